"""Records the segments of a partition in ``F[i,j]`` and repeats them in ``R[i,j]``.

A segment is the call of a layer of any model, or a chain of layers of an ``nn.Sequential``, which
ends where a layer is exempt from recomputation. What runs between segments, exempt layers and a
model's own code, is not repeated, and keeps the tensors it saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from pipert._typing import Value
from pipert.autograd.hooks import Hooks, without_hooks
from pipert.autograd.segment import Made, Segment
from pipert.batch.tensors import tensors_of, versions
from pipert.layers.effects import Effect
from pipert.layers.phase import checkpoint_here
from pipert.workers.context import NOTHING
from pipert.workers.thread_state import (
    NEW_THREAD_AUTOCAST,
    Autocast,
    autocast,
    get_autocast,
)

Compute = Callable[[Value], Value]
Drawing = Callable[[], AbstractContextManager[object]] | None


class Segments:
    """The segments of partition *j* of a checkpointed micro-batch.

    Owned by the segments, and they by the graph; references neither the run nor a queue.

    Args:
        replay: computes its first argument as ``R[i,j]``; the flag says whether it is called on a
            worker, where the context is already in place.
        effect: makes what compares the values that a segment returns, given their name in errors.
        hooks: the caller's saved-tensor hooks.
        copies: returns the copies that the partition computes with, of weights on other devices.
    """

    __slots__ = (
        "__weakref__", "_copies", "_effect", "_made", "_replay", "_segments", "hooks", "in_step",
    )  # fmt: skip

    def __init__(
        self,
        replay: Callable[[Callable[[], None], bool], None],
        effect: Callable[[str], Effect],
        hooks: Hooks,
        copies: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._replay = replay
        self._effect = effect
        self.hooks = hooks
        self._copies = copies
        self.in_step: Callable[..., Sequence[Tensor | None]] | None = None
        self._segments: list[weakref.ref[Segment]] = []
        self._made: dict[int, Made] = {}

    def call(
        self,
        name: str,
        first: Compute,
        compute: Compute,
        drawing: Drawing,
        value: Value,
        copies: bool,
    ) -> Value:
        """Compute a segment, and record it.

        Args:
            name: that of its output in errors.
            first: computes the segment in ``F``.
            compute: computes it in ``R``.
            drawing: makes the block in which ``R`` draws; ``None`` if no layer draws.
            value: the input.
            copies: whether the layers get copies of its tensors, which they may change.

        Raises:
            RuntimeError: a layer has changed an input that was not copied.
        """
        effect, settings = self._effect(name), get_autocast()

        def again(value: Value) -> Value:
            with _autocast(settings), NOTHING if drawing is None else drawing():
                y = compute(value)
            effect.note(y)
            return y

        segment = Segment(self, again, copies)
        before = checkpoint_here.set(True)
        try:
            if settings == NEW_THREAD_AUTOCAST:
                y = segment.record(first, value, self._made, self._copies)
            else:
                with _autocast(settings):
                    y = segment.record(first, value, self._made, self._copies)
        finally:
            checkpoint_here.reset(before)
        effect.note(y)
        self._segments.append(weak := weakref.ref(segment))
        if not copies:
            outputs = tensors_of(y)[0]
            for k, (tensor, now) in enumerate(zip(outputs, versions(outputs), strict=True)):
                self._made[id(tensor)] = weakref.ref(tensor), now, weak, k
        return y

    def recompute(self, on_worker: bool, to_fill: Segment | None = None) -> None:
        """Recompute all segments, as ``R[i,j]``, or what ``F`` of one segment has saved."""

        def compute() -> None:
            for segment in self._alive():
                if segment is to_fill:
                    segment.fill()
                    break
                if to_fill is None:
                    segment.recompute()
                elif segment.is_used:
                    segment.build()

        # Hooks that are on around a backward are not meant for what it recomputes.
        with NOTHING if on_worker else without_hooks():
            try:
                self._replay(compute, on_worker)
            finally:
                for segment in self._alive():
                    segment.outputs = ()

    def recompute_missing(self) -> None:
        """Recompute what the imminent backward needs."""
        # The first goes backward last: as long as its graph is there, the others need none.
        found = [each.is_missing for each in self._alive() if each.is_pair]
        if found and found[0]:
            self.recompute(False)

    def _alive(self) -> list[Segment]:
        return [segment for weak in self._segments if (segment := weak()) is not None]


def _autocast(settings: Autocast) -> AbstractContextManager[object]:
    """Return a block with these settings, and without the cache of casts, which threads share.

    The graph of ``F`` would have casts of other micro-batches, and nobody clears it after ``R``.
    """
    is_off = get_autocast() == settings == NEW_THREAD_AUTOCAST
    return NOTHING if is_off else autocast((False, settings[1]))
