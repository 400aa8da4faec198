"""Checkpoints a model with its own ``forward``: layers' calls are recorded and recomputed together.

The standard way is to run the forward again. A ``forward`` whose stack spans all partitions cannot
be run from the middle, so the calls of layers are recomputed instead: ``R[i,j]`` repeats those of
partition *j* in order. The model's own code keeps the tensors it saves, as without checkpointing.
An argument that is the unchanged output of an earlier call in the same partition is not kept, but
taken from the repetition of that call. So a chain of layers keeps only what a partition of an
``nn.Sequential`` keeps: its first input.

A layer that changes its argument in place cannot be repeated. One that declares so (by
``inplace=True``, or an ``nn.Sequential`` that begins with such a layer) is not recorded, and keeps
the tensors it saves, like the model's own code. Others are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from pipert._torch import tensor_hooks
from pipert._typing import Tensors, Value
from pipert.any_model.map_tensors import in_same_object
from pipert.autograd.checkpoint import Checkpoint, proxy_of
from pipert.autograd.hooks import Hooks
from pipert.autograd.recompute import Recomputation, refuse_changed
from pipert.batch.tensors import describe, tensors_of, version
from pipert.batch.trees import CLOSED, ORDINARY, held_by
from pipert.errors import add_note
from pipert.layers.call import Layers
from pipert.layers.phase import checkpointing
from pipert.workers.context import NOTHING
from pipert.workers.thread_state import Autocast, autocast, get_autocast

T = TypeVar("T")

Compute = Callable[..., Value]
Around = Callable[[], AbstractContextManager[object]] | None


class CheckpointedCalls:
    """The recorded calls of layers in partition *j*, of a checkpointed micro-batch.

    Owned by the graph; references neither the run nor a queue. Calls reference earlier calls, and
    checkpoints reference this object, so there is no cycle.

    Args:
        layers: the layers of the partition.
        i: the micro-batch.
        hooks: the caller's saved-tensor hooks.
    """

    __slots__ = (
        "__weakref__", "_calls", "_hooks", "_i", "_layers", "_outputs",
    )  # fmt: skip

    def __init__(self, layers: Layers, i: int, hooks: Hooks) -> None:
        self._layers = layers
        self._i = i
        self._hooks = hooks
        self._calls: list[tuple[CheckpointedCall, weakref.ref[Checkpoint]]] = []
        self._outputs: dict[int, _CallOutput] | None = {}

    def call(
        self, layer: str, compute: Compute, drawing: Around, args: Any, kwargs: dict[str, Any]
    ) -> Value:
        """Call a layer, and record it.

        Args:
            layer: the layer's name in errors.
            compute: calls the layer.
            drawing: makes the block in which the recomputation draws; ``None`` if no layer draws.
            args, kwargs: the layer's arguments.

        Raises:
            RuntimeError: the layer has changed an argument.
        """
        outputs = self._outputs
        assert outputs is not None
        note = partial(self._layers.note_of_call, self._i, layer)
        call = CheckpointedCall(compute, drawing, note, outputs, self._hooks)
        checkpoint = Checkpoint(call, self)
        given = args, kwargs
        objects = objects_in((*args, *kwargs.values()))
        returned: list[Value] = []

        def first_time(_: Value) -> Value:
            # With the caller's own lists and dicts, since the layer may add to them.
            returned.append(compute(*args, **kwargs))
            return returned[0]

        with checkpointing():
            y = checkpoint.record(first_time, given)
        y = in_same_object(returned.pop(), y)
        call.refuse_changes()
        refuse_changes(objects)
        self._calls.append((call, weakref.ref(checkpoint)))
        for k, tensor in enumerate(tensors_of(y)[0]):
            outputs[id(tensor)] = _CallOutput(weakref.ref(tensor), version(tensor), call, k)
        return y

    def end(self) -> None:
        """Stop recording."""
        self._outputs = None

    def first(self) -> Checkpoint | None:
        """Return the checkpoint that goes backward last: as long as it lives, the others do."""
        calls = ((call, weak()) for call, weak in self._calls)
        return next((found for call, found in calls if found is not None and call.saves), None)

    def refill(self, on_worker: bool) -> None:
        """Recompute all calls: ``R[i,j]``."""
        self._recompute(self._refill_each, on_worker)

    def begin_backward(self, differentiate: Callable[..., Any]) -> None:
        """Let ``B[i,j]`` of a step differentiate the graphs of ``R[i,j]`` by this function."""
        for _, weak in self._calls:
            if (checkpoint := weak()) is not None:
                checkpoint.in_step = differentiate

    def one(self, recomputation: Recomputation, compute: Callable[[], T]) -> T:
        """Recompute one call by ``compute``, after the earlier calls whose outputs are used."""
        calls = [call for call, _ in self._calls]
        before = calls[: calls.index(recomputation)]  # type: ignore[arg-type]
        found: list[T] = []

        def compute_in_order() -> None:
            for call in before:
                if call.is_used:
                    call.compute(True)
            found.append(compute())

        self._recompute(compute_in_order, False)
        return found[0]

    def _recompute(self, compute: Callable[[], None], on_worker: bool) -> None:
        try:
            self._layers.replay(self._i, lambda: compute, lambda _: None, on_worker)
        finally:
            for call, _ in self._calls:
                call.outputs = None

    def _refill_each(self) -> None:
        for call, weak in self._calls:
            checkpoint = weak()
            if checkpoint is not None:
                checkpoint.refill(True)
            elif call.is_used:
                call.compute(True)

    def __repr__(self) -> str:
        return f"<CheckpointedCalls of {len(self._calls)} calls of micro-batch {self._i}>"


class _CallOutput(NamedTuple):
    """An output tensor of a call."""

    tensor: weakref.ref[Tensor]
    version: int
    call: CheckpointedCall
    k: int
    """Its index among the call's outputs."""


class CheckpointedCall(Recomputation):
    """One recorded call of a layer.

    Args:
        compute: calls the layer.
        drawing: makes the block in which the recomputation draws; ``None`` if no layer draws.
        note: describes the layer and its arguments, for errors.
        earlier: the outputs of earlier calls, by id.
        hooks: as in :class:`Recomputation`.
    """

    __slots__ = (
        "_autocast", "_compute", "_drawing", "_earlier", "_note", "_origins", "_watched", "is_used",
        "outputs",
    )  # fmt: skip

    def __init__(
        self,
        compute: Compute,
        drawing: Around,
        note: Callable[[Any, dict[str, Any]], str],
        earlier: dict[int, _CallOutput],
        hooks: Hooks,
    ) -> None:
        super().__init__(None, hooks)
        self._compute = compute
        self._drawing = drawing
        self._note = note
        self._earlier = earlier
        self._autocast: Autocast = get_autocast()
        self._origins: list[tuple[CheckpointedCall, int] | None] = []
        """The call that made each argument, and the output's index; ``None`` for others."""
        self._watched: list[tuple[Tensor, int, int]] = []  # with their versions and hooks
        self.outputs: Tensors | None = None
        """The outputs of the current repetition."""
        self.is_used = False
        """Whether a later call takes an output as an argument."""

    def refuse_changes(self) -> None:
        """Refuse a layer that has changed an argument in place, or put a hook on it."""
        watched, self._watched = self._watched, []
        for tensor, before, hooks in watched:
            if _hooks_of(tensor) != hooks:
                raise RuntimeError(
                    "a layer registers a hook on its argument, or retains its gradient, and would "
                    "do so again when it is recomputed; do that with a clone in the layer, in the "
                    "model's own code, or use checkpoint='never'"
                )
            if version(tensor) != before:
                raise RuntimeError(
                    f"a layer changes its argument in place ({describe(tensor)}), which cannot be "
                    "undone when it is recomputed; use inplace=False there, a cut outside of the "
                    "module that calls it, or checkpoint='never'"
                )

    def _replay(
        self, get_value: Callable[[], Value], check: Callable[[Value], None], on_worker: bool
    ) -> None:
        args, kwargs = get_value()
        try:
            with self._autocast_of_call(), NOTHING if self._drawing is None else self._drawing():
                y = self._compute(*args, **kwargs)
        except BaseException as error:
            add_note(error, partial(self._note, args, kwargs))
            raise
        if self.is_used:
            self.outputs = tensors_of(y)[0]
        check(y)

    def _autocast_of_call(self) -> AbstractContextManager[object]:
        """Return a block with the autocast of this call; without a cache, as nobody clears it."""
        is_same = get_autocast() == self._autocast
        return NOTHING if is_same else autocast((False, self._autocast[1]), False)

    def connections(self, xs: Tensors) -> Tensors:
        origins = [self._origins[k] for k in self._wanting]
        return tuple(
            [x if origin is None else proxy_of(x) for x, origin in zip(xs, origins, strict=True)]
        )

    def _keep(self, tensors: Tensors) -> list[Tensor]:
        earlier, self._earlier = self._earlier, {}
        self._tensors, self._versions = [], []
        for tensor in tensors:
            found = earlier.get(id(tensor))
            now = version(tensor)
            if found is not None and found.tensor() is tensor and found.version == now:
                found.call.is_used = True
                self._origins.append((found.call, found.k))
            else:
                self._origins.append(None)
                self._tensors.append(tensor.detach())
                self._versions.append(now)
            self._watched.append((tensor, now, _hooks_of(tensor)))
        return list(tensors)

    def _kept(self, goes_on: bool) -> list[Tensor]:
        stored = zip(self._tensors, self._versions, strict=True)
        kept = []
        for k, origin in enumerate(self._origins):
            if origin is None:
                tensor, before = next(stored)
                refuse_changed(tensor, before)
                kept.append(tensor.detach())
            else:
                call, output = origin
                assert call.outputs is not None
                tensor = call.outputs[output].detach()
                kept.append(tensor.requires_grad_(goes_on and k in self._wanting))
        return kept

    def _given(self, tensors: Sequence[Tensor]) -> Tensors:
        return tuple(tensors)

    def __repr__(self) -> str:
        return f"<CheckpointedCall of {self._compute!r}>"


def _hooks_of(tensor: Tensor) -> int:
    return len(tensor_hooks(tensor) or ()) + tensor.retains_grad if tensor.requires_grad else 0


Objects = list[tuple[Any, list[tuple[Tensor, int]]]]


def objects_in(values: Iterable[Any]) -> Objects:
    """Return the objects among arguments, each with the tensors in it and their versions.

    A recomputed call would find an object, such as a key-value cache, changed by its forward, and
    change it again. Lists and dicts may change: the recomputation gets those from before the call.
    """
    return [(value, _versions(value)) for value in _objects(values)]


def refuse_changes(objects: Objects) -> None:
    """Refuse a layer that has changed one of the objects that were found before its call.

    Raises:
        RuntimeError: a tensor in one of them has been changed, replaced, added or removed.
    """
    for value, before in objects:
        if [(id(x), old) for x, old in before] != [(id(x), now) for x, now in _versions(value)]:
            raise RuntimeError(
                f"a layer changes its argument, a {type(value).__qualname__}, and would do so "
                "again when it is recomputed; avoid that (models of transformers take "
                "use_cache=False), exempt it with pipert.never_recompute (as layers that hand keys "
                "and values to later ones, in Gemma3n), or use checkpoint='never'"
            )


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    tensors = {id(part): part for part in held_by(value) if isinstance(part, Tensor)}
    return [(tensors[number], version(tensors[number])) for number in sorted(tensors)]


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        kind = type(value)
        if kind is tuple or kind is list:
            yield from _objects(value)
        elif kind is dict:
            yield from _objects(value.values())
        elif kind not in ORDINARY and not isinstance(value, CLOSED):
            yield value
