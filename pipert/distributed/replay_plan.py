"""Finds a model's layers, where its parameters belong, and what crosses, by recordings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipert._torch import NormBase
from pipert._typing import Value
from pipert.batch.tensors import tensors_of
from pipert.batch.trees import flatten
from pipert.distributed.placeholders import (
    Cuts,
    Name,
    Record,
    ReplayError,
    changed_buffer,
    inputs_unchanged,
)
from pipert.distributed.replay import Replay
from pipert.layers.modules import modules_of
from pipert.layers.random_numbers import RunSeed, TaskRng
from pipert.model.calls import unchanged
from pipert.model.cuts import check_cuts, homes, layers_of

OWN_STREAM = -1


def cuts_of(model: nn.Module, cuts: Iterable[str]) -> Cuts:
    """Check the cuts of a model, and find its layers.

    Raises:
        ValueError, TypeError: as :func:`pipert.pipeline`.
    """
    names = check_cuts(model, cuts)
    begins = {model.get_submodule(name): j for j, name in enumerate(names, 1)}
    layers = {
        module: name
        for name, module in layers_of(model, names).items()
        if module in begins or any(map(_has_state, modules_of(module)))
    }
    return Cuts(model, names, layers, begins)


def _has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, or statistics that each micro-batch changes."""
    return bool(module._parameters) or isinstance(module, NormBase)


def event_drawing(seed: RunSeed, i: int, device: torch.device) -> Callable[[int], Any]:
    """Return what makes the block in which an event of micro-batch ``i`` draws."""

    def drawing(event: int) -> TaskRng:
        number = (i << 32) + event + (1 << 62)
        return TaskRng(seed, number, device, ("event", number))  # a kind of its own: any may draw

    return drawing


@dataclass(eq=False)
class ReplayPlan:
    """The cuts of a model, the partitions that use each parameter, and the records so far."""

    cuts: Cuts
    device: torch.device
    uses: dict[nn.Parameter, set[int]] = field(default_factory=dict)
    layers: dict[nn.Module, set[int]] = field(default_factory=dict)
    """The partitions that call each layer."""
    needs_values: str = ""
    """Why no recording on meta is possible, if so."""
    records: dict[Any, Record] = field(default_factory=dict)

    def place(self, example: Value) -> None:
        """Find the partitions that use each parameter, from a recording of the example.

        Where that fails for lack of values, layers belong to the partition of the last cut that was
        registered before them.
        """
        replay, _ = self._recording()
        try:
            self._run(replay, example)
        except ReplayError as error:
            if not error.needs_values:
                raise
            self.needs_values = str(error)
        names = {name: layer for layer, name in self.cuts.layers.items()}
        registered = homes(names, list(self.cuts.names))
        uses: dict[nn.Parameter, set[int]] = defaultdict(set)
        for parameter, used in replay.own_parameters.items():
            uses[parameter] |= used
        self.layers = {layer: {registered[name]} for layer, name in self.cuts.layers.items()}
        self.layers.update(replay.called)  # and modules that layers are given
        for layer, used in self.layers.items():
            for parameter in layer.parameters():
                uses[parameter] |= used
        for parameter in self.cuts.model.parameters():
            self.uses[parameter] = uses[parameter] or {0}

    def places(self) -> list[list[int]]:
        """Return the partitions that use each parameter, in the order of registration."""
        return [sorted(self.uses[p]) for p in self.cuts.model.parameters()]

    def _recording(self, i: int = 0, seed: int = 0) -> tuple[Replay, RunSeed]:
        """Return a replay that records, and what tells whether the own code has drawn."""
        own, events = RunSeed(seed), RunSeed(seed)
        for run in (own, events):
            run.settle()
        blocks = {True: event_drawing(own, i, self.device)}
        blocks[False] = event_drawing(events, i, self.device)
        draw: Callable[[int], Any] = lambda event: blocks[event == OWN_STREAM](event)  # noqa: E731
        return Replay(self.cuts, self.cuts.n, self.device, draw, _compute_nothing, None), own

    def _run(self, replay: Replay, x: Value) -> None:
        """Record; a model that is refused leaves its buffers and the inputs unchanged."""
        tensors, rebuild = tensors_of(x)
        copy = rebuild(tuple([tensor.detach().clone() for tensor in tensors]))
        with unchanged(self.cuts.model), inputs_unchanged(copy):
            replay.run(self.cuts.model, copy)
            self.refuse_changed_buffers(replay)

    def refuse_changed_buffers(self, replay: Replay) -> None:
        """Refuse own code that has kept a layer's value in a buffer of the model."""
        for name, buffer in self.cuts.model.named_buffers():
            if replay.is_of_layers(buffer):
                raise changed_buffer(name)

    def key(self, x: Value) -> Any:
        """Return what a record depends on: what is in the inputs, the shapes, the mode.

        A record that took values holds for all shapes: making one for each would take too long.
        """
        leaves, spec = flatten(x)
        shapes = [
            (leaf.dtype, leaf.dim(), () if self.needs_values else tuple(leaf.shape))
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)
            for leaf in leaves
        ]
        return str(spec), tuple(shapes), self.cuts.model.training, torch.is_grad_enabled()

    def record(self, i: int, x: Value, seed: int) -> Record | None:
        """Return the record for micro-batch ``i``; ``None`` if it takes values to make one."""
        found = self.records.get(self.key(x))
        if found is not None or self.needs_values:
            return found
        replay, own = self._recording(i, seed)
        try:
            self._run(replay, x)
        except ReplayError as error:
            if not error.needs_values:
                raise
            self.needs_values = str(error)
            return None
        record = Record(self._crossing(replay.made, replay.used), replay.structure)
        if not own.used:  # else its choices may be others next time
            self.records[self.key(x)] = record
        return record

    def note(self, x: Value, seen: Iterable[tuple[dict[Name, int], dict[Name, int]]]) -> None:
        """Make the record for ``x`` from the names that all replays have made and used."""
        made, used = dict[Name, int](), dict[Name, int]()
        for made_there, used_there in seen:
            made.update(made_there)
            for name, j in used_there.items():
                used[name] = max(j, used.get(name, 0))
        self.records[self.key(x)] = Record(self._crossing(made, used), None)

    def _crossing(self, made: dict[Name, int], used: dict[Name, int]) -> list[list[Name]]:
        """Return for each partition the names that it sends on."""
        return [
            sorted(name for name, user in used.items() if made[name] <= j < user)
            for j in range(self.cuts.n)
        ]


def _compute_nothing(*_: Any) -> Any:
    raise AssertionError("a recording computes no layer")
