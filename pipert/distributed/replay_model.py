"""Runs any model over ranks: its partitions are computed by replays of its own forward.

Recordings find where its parameters belong, and what crosses. A record depends on what the inputs
are, and on modes. It serves for all shapes and values: where it does not fit, paths show it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import NormBase, has_hooks
from pipert._typing import Value
from pipert.any_model.checkpointed_calls import checkpointed_call
from pipert.batch.tensors import tensors_of, version
from pipert.batch.trees import flatten
from pipert.distributed.placeholders import (
    CHANGES,
    STRAYS,
    Cuts,
    NeedsValue,
    Record,
    ReplayError,
    forward_replaced,
    inputs_unchanged,
    untouched,
)
from pipert.distributed.rank_stage import RankBatch
from pipert.distributed.recording import Recording
from pipert.distributed.replay import Replay
from pipert.layers.call import Layers, Watch
from pipert.layers.modules import modules_of
from pipert.layers.place import Place, describe_layer
from pipert.layers.random_numbers import RunSeed, TaskRng
from pipert.model.cuts import check_cuts, homes, layers_of
from pipert.recompute.segment import Segments
from pipert.schedules.action import Action

OWN_STREAM = -1
RECORDS = 64
"""How many records are kept."""


def cuts_of(model: nn.Module, cuts: Iterable[str], device: torch.device) -> Cuts:
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
    return Cuts(model, device, names, layers, begins)


def _has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, or statistics that each micro-batch changes."""
    return bool(module._parameters) or isinstance(module, NormBase)


def event_drawing(seed: RunSeed, i: int, device: torch.device) -> Callable[[int], TaskRng]:
    """Return what makes the block in which an event of micro-batch ``i`` draws."""

    def drawing(event: int) -> TaskRng:
        kind = f"event of {i}"  # one of its own: any may draw
        return TaskRng(seed, Action(kind, i, event - OWN_STREAM), device)

    return drawing


@dataclass(eq=False)
class ReplayModel:
    """A model that keeps its own forward: its cuts, and the records so far."""

    cuts: Cuts
    inputs: str
    uses: dict[nn.Parameter, set[int]] = field(default_factory=dict)
    """The partitions that use each parameter."""
    layers: dict[nn.Module, set[int]] = field(default_factory=dict)
    """The partitions that call each layer."""
    reads_values: bool = False
    """Whether the own code of the last partition decides by values, so that there are no records
    and all tensors that are alive cross."""
    records: dict[Any, Record] = field(default_factory=dict)
    """By what the inputs are."""

    def place(self, example: Value) -> None:
        """Find the partitions that use each parameter, from a recording of the example.

        A layer that the example skips belongs to the partition of the last cut that was registered
        before it; and to the last one if what follows depends on values there.
        """
        recording, _ = self._recording(example)
        names = {name: layer for layer, name in self.cuts.layers.items()}
        registered = homes(names, list(self.cuts.names))
        rest = {self.cuts.n - 1} if self.reads_values else None
        uses: dict[nn.Parameter, set[int]] = defaultdict(set)
        for parameter, used in recording.own_parameters.items():
            uses[parameter] |= used
        layers = self.cuts.layers.items()
        self.layers = {layer: rest or {registered[name]} for layer, name in layers}
        self.layers.update(recording.called)  # and modules that layers are given
        for layer, used in self.layers.items():
            for parameter in layer.parameters():
                uses[parameter] |= used
        for parameter in self.cuts.model.parameters():
            self.uses[parameter] = uses[parameter] or rest or {0}

    def _recording(self, x: Value, i: int = 0, seed: int = 0) -> tuple[Recording, bool]:
        """Record the forward of ``x``; return that, and whether the own code has drawn.

        A model that is refused leaves its buffers and the inputs unchanged.
        """
        own, events = RunSeed(), RunSeed()
        for run in (own, events):
            run.draw(seed)
        for run in (events, own):  # the other way round than they drew
            run.settle()

        def drawing(event: int) -> TaskRng:
            run = own if event == OWN_STREAM else events
            return event_drawing(run, i, self.cuts.device)(event)

        recording = Recording(self.cuts, drawing)
        tensors, rebuild = tensors_of(x)
        copy = rebuild(tuple([tensor.detach().clone() for tensor in tensors]))
        unchanged = self._buffers_unchanged(recording)
        try:
            with untouched(self.cuts.model), unchanged, inputs_unchanged(copy):
                recording.run(self.cuts.model, copy)
        except NeedsValue:
            if not recording.is_at_end:
                raise
            self.reads_values = True
        return recording, own.used

    @contextmanager
    def _buffers_unchanged(self, recording: Recording) -> Iterator[None]:
        """Refuse own code that changes a buffer in the block, in which ``recording`` runs."""
        of_layers = {m for layer in self.cuts.layers for m in modules_of(layer)}
        named = self.cuts.model.named_modules()
        own = {module: name for name, module in named if module not in of_layers}

        def versions() -> dict[str, tuple[int, int]]:
            return {
                name: (id(buffer), version(buffer))
                for module, prefix in own.items()
                for name, buffer in module.named_buffers(prefix, recurse=False)
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set
            }

        before = versions()
        yield
        after = versions()
        for name, buffer in self.cuts.model.named_buffers():
            if recording.is_of_layers(buffer) or after.get(name) != before.get(name):
                raise ReplayError(
                    f"the model's own code changes the buffer {name!r}, {CHANGES}"
                )

    def _kind(self, x: Value) -> Any:
        """Return what a record depends on."""
        leaves, spec = flatten(x)
        kinds = [
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
        ]
        kind = self.cuts.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return str(spec), tuple(kinds), self.cuts.model.training, torch.is_grad_enabled(), casts

    def _record(self, i: int, x: Value, seed: int) -> Record | None:
        """Return the record for micro-batch ``i``; ``None`` if there is none."""
        kind = self._kind(x)
        if kind in self.records:
            return self.records[kind]
        if not self.reads_values:
            recording, draws = self._recording(x, i, seed)
        if self.reads_values:
            return None
        record = recording.record()
        if not draws:  # else its choices may be others next time
            if len(self.records) == RECORDS:
                self.records.clear()
            self.records[kind] = record
        return record

    def prepare(self, batch: RankBatch) -> None:
        """Find the records of the micro-batches."""
        seed = batch.seed.number or 0
        batch.records[:] = [self._record(i, x, seed) for i, x in enumerate(batch.inputs)]


@dataclass(eq=False)
class ReplayLayers:
    """The layers of one partition in a mini-batch, called by replays of the model's forward."""

    model: ReplayModel
    place: Place
    layers: Layers
    batch: RankBatch

    def segments(self, i: int) -> Segments:
        """Begin to checkpoint micro-batch ``i`` in its forward."""
        return self.layers.segments(i)

    def forward(
        self, i: int, segments: Segments | None, x: Value, watch: Watch | None = None
    ) -> Value:
        """Replay the forward of micro-batch ``i``, of which ``x`` has arrived."""
        compute = partial(self._replay, i, segments)
        return compute(x) if watch is None else watch(compute, x)

    def _replay(self, i: int, segments: Segments | None, x: Value) -> Value:
        batch, cuts = self.batch, self.model.cuts
        drawing = event_drawing(batch.seed, i, cuts.device)
        compute = partial(self._call, i, segments, drawing)
        replay = Replay(self.place.j, compute, batch.records[i], cuts, drawing)
        if self.place.j:
            replay.names.receive(*x)
        with inputs_unchanged(batch.inputs[i]):
            return replay.run(cuts.model, batch.inputs[i])

    def _call(
        self, i: int, segments: Segments | None, drawing: Callable[[int], Any], module: nn.Module,
        event: int, call: Callable[..., Any], args: Any, kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        used, name = self.model.layers[module], self.model.cuts.layers[module]
        if self.place.j not in used and any(p.is_meta for p in module.parameters()):
            raise ReplayError(
                f"partition {self.place.j} calls the layer {name!r}, whose parameters are in "
                f"partition {min(used)}: {STRAYS}"
            )
        with drawing(event):
            if segments is None or not self.layers.recomputes(module):
                return call(*args, **kwargs)
            compute = partial(self._checkpoint, i, segments, module, partial(drawing, event))
            if not has_hooks(module):
                return compute(call, *args, **kwargs)
            # Hooks stay outside, since the own code may use what they collect.
            with forward_replaced(module, partial(compute, module.forward)):
                return call(*args, **kwargs)

    def _checkpoint(
        self, i: int, segments: Segments, module: nn.Module, drawing: Callable[[], Any],
        call: Callable[..., Any], /, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        name = describe_layer(self.model.cuts.layers[module], module)
        compute = partial(self.layers.call_layer, i, module, name, call)
        return checkpointed_call(segments, name, compute, drawing, args, kwargs)
