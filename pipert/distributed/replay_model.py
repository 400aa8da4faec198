"""Runs any model over ranks: its partitions are computed by replays of its own forward.

Recordings, runs of the forward on meta tensors, find where its parameters belong, and what crosses.
A layer that needs values, as experts do that choose by them, is recorded with zeros. A record
depends on what the inputs are, and on modes. It serves for all shapes and values: where it does not
fit, paths show it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import FakeTensorMode, NormBase, has_hooks, plain_call, pytree
from pipert._typing import Tensors, Value
from pipert.any_model.checkpointed_calls import checkpointed_call
from pipert.batch.tensors import tensors_of, version
from pipert.batch.trees import flatten
from pipert.distributed.placeholders import (
    CHANGES,
    LACKS,
    META,
    STRAYS,
    Cuts,
    Name,
    NeedsValue,
    Record,
    ReplayError,
    Zeros,
    empty_like,
    forward_replaced,
    inputs_unchanged,
    placeholder_of,
    refuse_changed_arguments,
    reshape,
    untouched,
)
from pipert.distributed.rank_stage import RankBatch
from pipert.distributed.replay import Drawing, Events, Replay, called
from pipert.layers.call import Layers, Watch
from pipert.layers.modules import modules_of
from pipert.layers.place import Place, describe_layer
from pipert.layers.random_numbers import RunSeed, TaskRng
from pipert.model.cuts import check_cuts, homes, layers_of
from pipert.recompute.segment import Segments
from pipert.schedules.action import Action

OWN_STREAM = -1


class Recording(Events):
    """A run of the forward that computes no partition, on meta tensors or zeros."""

    def __init__(self, cuts: Cuts, drawing: Drawing) -> None:
        super().__init__(cuts, drawing)
        self._zeros: Zeros | None = None  # while a layer is recorded with them
        norms = [m for layer in cuts.layers for m in layer.modules() if isinstance(m, NormBase)]
        self._statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        self._used: dict[Name, int] = {}
        """For each name, the last partition that uses it, if another one has made it."""
        self.own_parameters: dict[nn.Parameter, set[int]] = defaultdict(set)
        """The partitions whose own code uses each parameter."""
        self.called: dict[nn.Module, set[int]] = defaultdict(set)
        """The partitions that call each layer."""
        self._structure: Any = None

    def run(self, function: Callable[..., Any], x: Any) -> None:
        """Run the forward, ``function`` on ``x``."""
        self._structure = flatten(super().run(function, x))[1]

    def record(self) -> Record:
        """Return what was found."""
        home = self.names.home
        crossing = [
            sorted(name for name, user in self._used.items() if home(name) <= j < user)
            for j in range(self._cuts.n)
        ]
        return Record(crossing, self.paths, self._structure)

    def _use(self, tensors: Sequence[Tensor]) -> None:
        super()._use(tensors)
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self.own_parameters[tensor].add(self._at)
            elif self._is_elsewhere(tensor):
                self._used[self.names.of(tensor)] = self._at  # type: ignore[index]
            elif id(tensor) in self._statistics:
                raise ReplayError(
                    f"the model's own code reads running statistics of a layer, {LACKS}"
                )

    def _call_layer(
        self, module: nn.Module, call: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Tensors]:
        name, call = self._cuts.layers[module], plain_call(module)
        for one in (module, *args, *kwargs.values()):
            if isinstance(one, nn.Module):  # such as an embedding whose weight a head uses
                self.called[one].add(self._at)
        given = tensors_of((args, kwargs))[0]
        with refuse_changed_arguments(name, (*args, *kwargs.values())):
            try:
                with self._drawing(self._event):
                    return call(*args, **kwargs), given
            except NeedsValue:
                self._zeros = Zeros(module, self._cuts.device)
            try:
                with self._drawing(self._event):
                    return self._zeros.call(name, call, args, kwargs), given
            finally:
                self._zeros = None

    def _inside_layer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._zeros is not None:
            args, kwargs = pytree.tree_map_only(Tensor, self._zeros.of, (args, kwargs))
            return func(*args, **kwargs)
        tensors = tensors_of((args, kwargs))[0]
        if not any(t.is_meta or isinstance(t, nn.Parameter) for t in tensors):
            return func(*args, **kwargs)
        return self._call_function(func, args, kwargs, tensors)[0]

    def _call_function(
        self, func: Any, args: Any, kwargs: Any, tensors: Tensors
    ) -> tuple[Any, Sequence[int]]:
        device = self._cuts.device
        casts = device if torch.is_autocast_enabled(device.type) else None
        try:
            return on_meta(func, args, kwargs, tensors, casts)
        except Exception as error:
            raise NeedsValue(
                f"the model's own code in partition {self._at} needs the value of a tensor of a "
                f"layer, in {called(func)}: {str(error)[:200]}; put it into a layer"
            ) from error


def on_meta(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors, casts: torch.device | None
) -> tuple[Any, list[int]]:
    """Call a torch function with meta tensors in place of all others, which stay unchanged.

    Args:
        func, args, kwargs: the call.
        tensors: those among the arguments.
        casts: the device whose autocast is on; torch has none for meta tensors.

    Returns:
        The result, in meta tensors but for those arguments that the function returns; and which
        of ``tensors`` it would change.
    """
    if func in (Tensor.cpu, Tensor.cuda):
        return args[0], []
    if func in (Tensor.__getitem__, Tensor.__setitem__):  # a real mask has its number of rows
        args = (args[0], _as_numbers(args[1]), *args[2:])
    mode = None if casts is None else FakeTensorMode(allow_non_fake_inputs=True)
    metas: dict[int, tuple[Tensor, int]] = {}

    def meta(x: Any) -> Any:
        if isinstance(x, torch.device) or (func is Tensor.to and type(x) is str):
            return casts or META
        if not isinstance(x, Tensor):
            return x
        if id(x) not in metas:
            one = x
            if mode is not None:
                with mode:
                    one = empty_like(x, casts)
            elif not x.is_meta:
                one = empty_like(x)
            metas[id(x)] = one, one._version
        return metas[id(x)][0]

    args, kwargs = pytree.tree_map(meta, (tuple(args), dict(kwargs)))
    if kwargs.get("device") is not None:
        kwargs["device"] = casts or META
    with torch.no_grad():
        y = func(*args, **kwargs)
    for x in tensors if mode is not None else ():
        if id(x) in metas:
            reshape(x, metas[id(x)][0].shape, metas[id(x)][0].stride())
    given = {id(metas[id(x)][0]): x for x in tensors if id(x) in metas}
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    results, rebuild = tensors_of(y)
    found = [given[id(t)] if id(t) in given else placeholder_of(t, needs_grad) for t in results]
    pairs = enumerate([metas.get(id(x)) for x in tensors])
    return rebuild(tuple(found)), [k for k, pair in pairs if pair and pair[0]._version != pair[1]]


def _as_numbers(index: Any) -> Any:
    """Return an index whose real masks are replaced by the numbers of the rows they select."""
    found: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(item, Tensor) and item.dtype == torch.bool and not item.is_meta
        found += item.nonzero(as_tuple=True) if is_mask else [item]
    return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]


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
        recording = self._recording(example)
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

    def _recording(self, x: Value) -> Recording:
        """Record the forward of ``x``, with random numbers that are the same on all ranks.

        A model that is refused leaves its buffers and the inputs unchanged.
        """
        model, device = self.cuts.model, self.cuts.device
        tensors, rebuild = tensors_of(x)
        copy = rebuild(tuple([tensor.detach().clone() for tensor in tensors]))
        with untouched(model, device):
            seed = RunSeed()
            seed.draw(0)
            recording = Recording(self.cuts, event_drawing(seed, 0, device))
            try:
                with self._buffers_unchanged(recording), inputs_unchanged(copy):
                    recording.run(model, copy)
            except NeedsValue:
                if not recording.is_at_end:
                    raise
                self.reads_values = True
        return recording

    @contextmanager
    def _buffers_unchanged(self, recording: Recording) -> Iterator[None]:
        """Refuse own code that changes a buffer in the block, in which ``recording`` runs."""
        of_layers = {m for layer in self.cuts.layers for m in modules_of(layer)}
        own = [module for module in self.cuts.model.modules() if module not in of_layers]

        def versions() -> set[tuple[str, int, int]]:
            return {
                (name, id(buffer), version(buffer))
                for module in own
                for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            }

        before = versions()
        yield
        changed = [name for name, *_ in versions() - before]
        named = self.cuts.model.named_buffers()
        changed += [name for name, buffer in named if recording.is_of_layers(buffer)]
        if changed:
            raise ReplayError(f"the model's own code changes the buffer {changed[0]!r}, {CHANGES}")

    def _kind(self, x: Value) -> Any:
        """Return what a record depends on."""
        leaves, spec = flatten(x)
        kinds = [
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
        ]
        kind = self.cuts.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return str(spec), tuple(kinds), self.cuts.model.training, torch.is_grad_enabled(), casts

    def record_of(self, x: Value) -> Record | None:
        """Return the record for a micro-batch; ``None`` if there is none."""
        kind = self._kind(x)
        if kind not in self.records and not self.reads_values:
            self.records[kind] = self._recording(x).record()
        return None if self.reads_values else self.records[kind]


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
