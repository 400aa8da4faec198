"""Checkpointing of a driven model: calls of layers are recorded, and recomputed together.

The stack of a ``forward`` cannot be replayed from the middle, so what is computed again are the
calls of layers: ``R[i,j]`` repeats those of partition *j*, one after the other, and the model's own
code between them keeps what it saves, as without checkpointing. An argument that is the output of
an earlier call of the same partition, unchanged, is not kept, but taken from the repetition of that
one. So a chain of layers keeps what a partition of an ``nn.Sequential`` keeps: its first input.

A layer that changes its argument in place cannot be undone. One that says so (``inplace=True``, or
an ``nn.Sequential`` that begins with one) is no call to be recorded: it keeps what it saves, like
the model's own code. Others are refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.autograd.again import Again, refuse_changed
from pipert.autograd.checkpoint import Checkpoint
from pipert.autograd.gate import proxy_of
from pipert.autograd.hooks import Hooks
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import describe, tensors_of, version
from pipert.driven.hooked import begin_again
from pipert.driven.objects import Objects
from pipert.errors import add_note
from pipert.layers.call import Layers, checkpointing
from pipert.workers.thread_state import Autocast, autocast, get_autocast

__all__: list[str] = []

T = TypeVar("T")

Compute = Callable[..., Value]
Around = Callable[[], AbstractContextManager[object]] | None


class Tape:
    """The calls of layers in partition *j*, of a micro-batch that is checkpointed.

    Owned by the graph; references neither the run nor a queue. Its calls reference those before
    them, and the checkpoints reference the tape, so there is no cycle.

    Args:
        layers: of the partition.
        i: the micro-batch.
        hooks: the caller's saved-tensor hooks.
    """

    __slots__ = ("__weakref__", "_calls", "_hooks", "_i", "_layers", "_made")

    def __init__(self, layers: Layers, i: int, hooks: Hooks) -> None:
        self._layers = layers
        self._i = i
        self._hooks = hooks
        self._calls: list[tuple[Call, weakref.ref[Checkpoint]]] = []
        self._made: dict[int, _Made] | None = {}

    def call(
        self, layer: str, compute: Compute, around: Around, args: Any, kwargs: dict[str, Any]
    ) -> Value:
        """Call a layer, and record it.

        Args:
            layer: as errors call it.
            compute: calls it.
            around: makes a block that is on around that, each time; ``None`` for nothing.
            args: what it gets.
            kwargs: likewise.

        Raises:
            RuntimeError: it has changed an argument.
        """
        made = self._made
        assert made is not None
        note = partial(self._layers.note_of_call, self._i, layer)
        call = Call(compute, around, note, made, self._hooks)
        checkpoint = Checkpoint(call, self)
        given = Arguments(args, kwargs) if kwargs else args  # a tuple is taken apart faster
        objects = Objects((*args, *kwargs.values()))

        def first_time(value: Value) -> Value:
            # A list or a dict is the caller's own: the layer may add to it.
            return call.first_time(given if call.has_callers_tensors else value)

        with checkpointing():
            y = checkpoint.record(first_time, given)
        call.refuse_changes()
        objects.refuse_changes()
        self._calls.append((call, weakref.ref(checkpoint)))
        for k, tensor in enumerate(tensors_of(y)[0]):
            made[id(tensor)] = _Made(weakref.ref(tensor), version(tensor), call, k)
        return y

    def end(self) -> None:
        """No further call is recorded."""
        self._made = None

    def first(self) -> Checkpoint | None:
        """The one of the calls that goes backward last: until then they are all there."""
        calls = ((call, weak()) for call, weak in self._calls)
        return next((found for call, found in calls if found is not None and call.saves), None)

    def recompute(self, on_worker: bool) -> None:
        """Compute all calls again: ``R[i,j]``."""
        try:
            self._layers.again(self._i, lambda: self._refill, lambda _: None, on_worker)
        finally:
            self._forget()

    def one(self, again: Again, compute: Callable[[], T]) -> T:
        """Let ``compute`` compute one call again, after those before it whose outputs it takes."""
        before = [call for call, _ in self._calls]
        before = before[: before.index(again)]  # type: ignore[arg-type]
        found: list[T] = []

        def both() -> None:
            for call in before:
                if call.is_used:
                    call.compute(True)
            found.append(compute())

        try:
            self._layers.again(self._i, lambda: both, lambda _: None, False)
        finally:
            self._forget()
        return found[0]

    def _refill(self) -> None:
        for call, weak in self._calls:
            checkpoint = weak()
            if checkpoint is not None:
                checkpoint.refill(True)
            elif call.is_used:
                call.compute(True)

    def _forget(self) -> None:
        for call, _ in self._calls:
            call.outputs = None

    def __repr__(self) -> str:
        return f"<Tape of {len(self._calls)} calls of micro-batch {self._i}>"


class _Made(NamedTuple):
    """An output of a call."""

    tensor: weakref.ref[Tensor]
    version: int
    call: Call
    k: int
    """Which of the call's tensors."""


class Call(Again):
    """One call of a layer.

    Args:
        compute: calls the layer.
        around: makes what is on around that, if anything.
        note: says which layer it is, and what it got.
        made: the outputs of the calls before, by id.
        hooks: as of :class:`Again`.
    """

    __slots__ = (
        "_around", "_autocast", "_compute", "_from", "_made", "_note", "_retaining", "_watched",
        "has_callers_tensors", "is_used", "outputs",
    )  # fmt: skip

    def __init__(
        self,
        compute: Compute,
        around: Around,
        note: Callable[[Any, dict[str, Any]], str],
        made: dict[int, _Made],
        hooks: Hooks,
    ) -> None:
        super().__init__(None, hooks)
        self._compute = compute
        self._around = around
        self._note = note
        self._made: dict[int, _Made] = made
        self._autocast: Autocast = get_autocast()
        self._from: list[tuple[Call, int] | None] = []
        self._watched: list[tuple[Tensor, int]] = []
        self._retaining: list[tuple[int, Tensor]] = []  # which of the arguments that want one
        self.outputs: Tensors | None = None
        """Of the present repetition."""
        self.is_used = False
        """Whether a later call takes an output of it from there."""
        self.has_callers_tensors = True
        """Whether the layer gets what the caller has given, and no copy of a leaf."""

    def first_time(self, value: Value) -> Value:
        """Call the layer."""
        args, kwargs = _arguments(value)
        with _NOTHING if self._around is None else self._around():
            return self._compute(*args, **kwargs)

    def refuse_changes(self) -> None:
        """Refuse a layer that has changed an argument in place, whose graph does not know it."""
        watched, self._watched = self._watched, []
        for k, number in enumerate(self._wanting):
            if watched[number][0].retains_grad:
                self._retaining.append((k, watched[number][0]))
        for tensor, before in watched:
            if version(tensor) != before:
                raise RuntimeError(
                    f"a layer changes its argument in place ({describe(tensor)}), which cannot be "
                    "undone when it is recomputed; use inplace=False there, a cut outside of the "
                    "module that calls it, or checkpoint='never'"
                )

    def _replay(
        self, get_value: Callable[[], Value], check: Callable[[Value], None], on_worker: bool
    ) -> None:
        value = get_value()
        try:
            y = self._again_under_autocast(value)
        except BaseException as error:
            add_note(error, partial(self._note, *_arguments(value)))
            raise
        if self.is_used:
            self.outputs = tuple([tensor.detach() for tensor in tensors_of(y)[0]])
        check(y)

    def _again_under_autocast(self, value: Value) -> Value:
        if get_autocast() == self._autocast:
            return self.first_time(value)
        with autocast(self._autocast, False):  # the model's own code has put it on
            return self.first_time(value)

    def fresh(self, begin: Callable[[Tensors], Tensors] | None = None) -> Value:
        return super().fresh(partial(begin_again, begin, self._retaining))

    def connections(self, xs: Tensors) -> Tensors:
        wanting = [self._from[k] for k in self._wanting]
        return tuple(
            [x if of is None else proxy_of(x) for x, of in zip(xs, wanting, strict=True)]
        )

    def _keep(self, tensors: Tensors) -> list[Tensor]:
        made, self._made = self._made, {}
        self._tensors, self._versions = [], []
        own = []
        for tensor in tensors:
            found = made.get(id(tensor))
            now = version(tensor)
            if found is not None and found.tensor() is tensor and found.version == now:
                found.call.is_used = True
                self._from.append((found.call, found.k))
            else:
                self._from.append(None)
                self._tensors.append(tensor.detach())
                self._versions.append(now)
            leaf = tensor.is_leaf and tensor.requires_grad
            self.has_callers_tensors &= not leaf
            own.append(tensor.clone() if leaf else tensor)
            self._watched.append((tensor, now))
        return own

    def _kept(self) -> list[Tensor]:
        own = zip(self._tensors, self._versions, strict=True)
        kept = []
        for of in self._from:
            if of is None:
                tensor, before = next(own)
                refuse_changed(tensor, before)
            else:
                call, k = of
                assert call.outputs is not None
                tensor = call.outputs[k]
            kept.append(tensor.detach())
        return kept

    def _given(self, tensors: Sequence[Tensor]) -> Tensors:
        return tuple(tensors)

    def __repr__(self) -> str:
        return f"<Call of {self._compute!r}>"


def _arguments(value: Value) -> tuple[Any, dict[str, Any]]:
    return value if isinstance(value, Arguments) else (value, {})


_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()
