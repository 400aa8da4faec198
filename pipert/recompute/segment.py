"""Segments: what ``R[i,j]`` repeats, from ``F[i,j]`` to the graph of ``R[i,j]``.

A segment is the call of a layer of any model, or a chain of layers of an ``nn.Sequential``, which
ends where a layer is exempt from recomputation. What runs between segments, exempt layers and a
model's own code, is not repeated, and keeps the tensors it saves.

The standard non-reentrant checkpoint keeps the graph of the forward without its saved tensors, and
the recomputation fills them in. It creates, fills and reads a Python object per saved tensor, which
costs as much as a small operation. So:

1. ``F[i,j]`` runs with grad enabled, as layers expect, and its graph saves numbers in place of
   tensors. Only the inputs are saved. One node takes the place of the graph. It is a function of
   the inputs, of the leaves that a walk of the graph finds, and of the copies of weights that live
   on other devices.
2. ``R[i,j]`` computes the segment again, exactly like ``F`` of a micro-batch that is not
   checkpointed, and keeps the graph. ``B[i,j]`` differentiates it.
3. ``R`` must do what ``F`` did: their outputs are compared (``recompute/effects.py``).
4. An input that is the unchanged output of an earlier segment is not saved, but taken from the
   repetition of that segment. Other inputs are saved as they were before the segment ran. One that
   anything has changed since is refused, as autograd would.
5. A hook may have captured a tensor of ``F``'s graph for a loss, as the models of transformers
   capture the logits of a router. A backward from there reads a number in place of a saved tensor:
   the segment is computed once more, on the spot, and the tensors that it saves are counted. Where
   a layer uses a graph of the caller's, or hooks on weights would see what a function does in the
   engine, all of ``F``'s graph stays and goes back that way: ``R`` fills in what it saves.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipert._torch import node_count, tensor_hooks
from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.engine import differentiate
from pipert.autograd.hooks import (
    DropSaved,
    hiding_partial_gradients,
    refuse,
    without_hooks,
)
from pipert.autograd.leaves import origins
from pipert.batch.tensors import describe, differentiable, tensors_of, versions
from pipert.errors import RecomputationError
from pipert.recompute.effects import REMEDY, Sampled, sampled
from pipert.recompute.nodes import are_needed, through_checkpoint
from pipert.recompute.public import checkpoint_here
from pipert.workers.context import NEW_THREAD_AUTOCAST, NOTHING, autocast, get_autocast

Compute = Callable[[Value], Value]
Again = Callable[[Value], tuple[Value, Tensors]]
Drawing = Callable[[], AbstractContextManager[object]] | None
SegmentOutput = tuple[Callable[[], Tensor | None], int, "Callable[[], Segment | None]", int]
"""An output of a segment: the tensor, by a weak reference, its version, the segment, likewise, and
the output's index."""


class Segments:
    """The segments of partition *j* of a checkpointed micro-batch.

    Owned by the segments, and they by the graph; references neither the run nor a queue.

    Args:
        replay: computes its first argument as ``R[i,j]``; the flag says whether it is called on a
            worker, where the context is already in place.
        compare: compares what a segment, of this name in errors, has returned both times.
        weights: returns the copies that the partition computes with, of weights on other devices.
    """

    __slots__ = (
        "__weakref__", "_compare", "_made", "_replay", "_segments", "in_step", "weights",
    )  # fmt: skip

    def __init__(
        self,
        replay: Callable[[Callable[[], None], bool], None],
        compare: Callable[[str, list[Sampled], list[Sampled]], None],
        weights: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._replay = replay
        self._compare = compare
        self.weights = weights
        self.in_step: Callable[..., Sequence[Tensor | None]] | None = None
        """Differentiates a graph in ``B[i,j]`` of a step, which asks for all gradients."""
        self._segments: list[weakref.ref[Segment]] = []
        self._made: dict[int, SegmentOutput] = {}

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
            value: the input, any pytree.
            copies: whether the layers get copies of its tensors, which they may change.

        Raises:
            RuntimeError: a layer has changed an input that was not copied, or put a hook on it.
        """
        settings, returned = get_autocast(), list[Sampled]()
        # Threads share the cache: F's graph would have casts of other micro-batches, and nobody
        # clears it after R.
        uncached = partial(autocast, (False, settings[1]))

        def again(value: Value) -> tuple[Value, Tensors]:
            is_off = get_autocast() == settings == NEW_THREAD_AUTOCAST
            with NOTHING if is_off else uncached(), NOTHING if drawing is None else drawing():
                y = compute(value)
            ys, _ = differentiable(y)
            self._compare(name, returned, sampled(ys))
            return y, ys

        segment = Segment(self, again, copies)
        before = checkpoint_here.set(True)
        try:
            with NOTHING if settings == NEW_THREAD_AUTOCAST else uncached():
                y, ys = segment.record(first, value, self._made)
        finally:
            checkpoint_here.reset(before)
        returned += sampled(ys)
        self._segments.append(weak := weakref.ref(segment))
        if not copies:
            outputs = tensors_of(y)[0]
            for k, (tensor, now) in enumerate(zip(outputs, versions(outputs), strict=True)):
                self._made[id(tensor)] = weakref.ref(tensor), now, weak, k
        return y

    def recompute(self, on_worker: bool, to_fill: Segment | None = None) -> None:
        """Recompute all segments, as ``R[i,j]``, or what ``F`` of one segment has saved."""
        segments = self._alive()

        def compute() -> None:
            for segment in segments:
                if segment is to_fill:
                    segment.fill()
                    break
                if to_fill is None and segment.keeps_graph():
                    segment.fill()
                elif segment.is_used or segment.is_pair and to_fill is None:
                    segment.build(keep=to_fill is None)

        # Hooks that are on around a backward are not meant for what it recomputes.
        with NOTHING if on_worker else without_hooks():
            try:
                self._replay(compute, on_worker)
            finally:
                for segment in segments:
                    segment.outputs = ()

    def recompute_missing(self) -> None:
        """Recompute what the imminent backward needs."""
        # The first goes backward last: as long as its graph is there, the others need none.
        first = next((one for one in self._alive() if one.is_pair or one.keeps_graph()), None)
        if first is not None and first.is_missing():
            self.recompute(False)

    def _alive(self) -> list[Segment]:
        return [segment for weak in self._segments if (segment := weak()) is not None]


class Segment:
    """One segment, and the memory that its two nodes share.

    Owned by the graph: by the *Checkpoint* node, or by the unpack hook of ``F``'s graph; and by
    later segments that take an output of it. References no run, no thread and no later segment.

    Args:
        group: it is recomputed with these.
        again: computes it again, in the context of the first time, with the same random numbers.
        copies: whether the layers get copies of the inputs, so that the first may work in place.
            Otherwise changes of inputs are refused.
    """

    __slots__ = (
        "__weakref__", "_again", "_copies", "_group", "_origins", "_rebuild", "_saved", "_saves",
        "_tensors", "_versions", "_wanting", "graph", "is_pair", "is_used", "outputs",
    )  # fmt: skip

    def __init__(self, group: Segments, again: Again, copies: bool) -> None:
        self._group = group
        self._again = again
        self._copies = copies
        self.graph: tuple[Sequence[GradientEdge], Sequence[GradientEdge]] | None = None
        """The inputs and outputs of ``R``'s graph, until ``B``, without their values."""
        self._saved: dict[int, tuple[Tensor, int]] = {}  # for F's graph, with versions
        self._saves = -1  # until the first computation is over
        self.is_pair = False
        """Whether one node has taken the place of the graph."""
        self.is_used = False
        """Whether a later segment takes an output."""
        self.outputs: Tensors = ()
        """The outputs of the current repetition, if they are used."""

    def record(
        self, compute: Compute, value: Value, made: dict[int, SegmentOutput]
    ) -> tuple[Value, Tensors]:
        """Run ``compute(value)``, and replace its graph by one node if possible (rules 1 and 5).

        ``made`` has the outputs of earlier segments, by id. Returns the output, and those tensors
        in it that require grad.

        Raises:
            RuntimeError: a layer has changed an input, or put a hook on it.
        """
        tensors, self._rebuild = tensors_of(value)
        before, hooks = versions(tensors), [] if self._copies else _hooks(tensors)
        inputs, xs, begins = self._save(tensors, before, made)
        forget, first = DropSaved(next, saves := count()), node_count()
        with torch.autograd.graph.saved_tensors_hooks(forget, self._take):
            y = compute(self._rebuild(inputs) if self._copies else value)
        ys, rebuild = differentiable(y)
        nodes = range(first, node_count())
        self._saves = next(saves)
        if ys and (found := origins(ys, begins, self._group.weights(), nodes)):
            self.is_pair = True
            ys = through_checkpoint(self, ys, xs, *found)
        if not self._copies:
            _refuse_changes(tensors, before)
            if _hooks(tensors) != hooks:
                raise RuntimeError(_HOOK)
        return rebuild(ys), ys

    def _save(
        self, tensors: Tensors, versions: list[int], made: dict[int, SegmentOutput]
    ) -> tuple[Tensors, Tensors, set[tuple[Any, int]]]:
        """Save the inputs as they are now (rule 4).

        Returns:
            The tensors to give the layers, the differentiable inputs, and for each of these the
            node and the number of its output at which the segment's graph begins.
        """
        self._origins: list[tuple[Segment, int] | None] = []
        self._tensors, self._versions = list[Tensor](), list[int]()
        self._wanting = list[int]()
        inputs, xs, begins = list[Tensor](), list[Tensor](), set[tuple[Any, int]]()
        for k, (tensor, now) in enumerate(zip(tensors, versions, strict=True)):
            found = made.get(id(tensor))
            origin = found[2]() if found and found[0]() is tensor and found[1] == now else None
            if found is not None and origin is not None:
                origin.is_used = True
                self._origins.append((origin, found[3]))
            else:
                self._origins.append(None)
                self._tensors.append(tensor.detach())
                self._versions.append(now)
            own = tensor.clone() if self._copies else tensor
            inputs.append(own)
            if own.requires_grad:
                self._wanting.append(k)
                xs.append(tensor)
                begins.add((own.grad_fn or order.edge_of(own).node, own.output_nr))
        return tuple(inputs), tuple(xs), begins

    def _compute(self) -> tuple[Tensors, Tensors]:
        """Compute the segment again; return its inputs and outputs that require grad.

        Raises:
            RuntimeError: an input was changed in place.
            RecomputationError: the layers did something else than the first time.
        """
        if (now := versions(self._tensors)) != self._versions:
            pairs = zip(self._tensors, now, self._versions, strict=True)
            changed = next(tensor for tensor, after, before in pairs if after != before)
            raise RuntimeError(
                "an input of a checkpointed partition was modified in place between its forward "
                f"and its recomputation: {describe(changed)}; clone it before modifying it"
            )
        stored, tensors = iter(self._tensors), list[Tensor]()
        for origin in self._origins:
            tensor = next(stored) if origin is None else origin[0].outputs[origin[1]]
            tensors.append(tensor.detach())
        xs = tuple([tensors[k].requires_grad_() for k in self._wanting])
        inputs = [*map(Tensor.clone, tensors)] if self._copies else tensors
        y, ys = self._again(self._rebuild(tuple(inputs)))
        if self.is_used:
            self.outputs = tensors_of(y)[0]
        return xs, ys

    def build(self, keep: bool = True) -> None:
        """Compute the segment again, and ``keep`` its graph."""
        xs, ys = self._compute()
        if keep:
            self.graph = tuple(map(order.edge_of, xs)), tuple(map(order.edge_of, ys))

    def fill(self) -> None:
        """Compute the segment again, and keep the tensors that it saves.

        Raises:
            RecomputationError: it saved another number of tensors than the first time.
        """
        found = list[tuple[Tensor, int]]()

        def keep(tensor: Tensor) -> None:
            found.append((tensor.detach(), tensor._version))

        with torch.autograd.graph.saved_tensors_hooks(DropSaved(keep), refuse):
            self._compute()
        if len(found) != self._saves:
            raise RecomputationError(
                f"a recomputation saved {len(found)} tensors and its forward {self._saves}{REMEDY}"
            )
        self._saved = dict(enumerate(found))

    def keeps_graph(self) -> bool:
        """Return whether ``F``'s graph has stayed, and saves something."""
        return not self.is_pair and self._saves > 0

    def is_missing(self) -> bool:
        """Return whether a backward has to compute the segment again."""
        return self.graph is None if self.is_pair else not self._saved

    def differentiate(self, dys: Sequence[Tensor | None], ctx: Any) -> list[Tensor | None]:
        """Return the needed gradients of inputs and leaves, given those of the outputs."""
        if torch.is_grad_enabled():
            raise RecomputationError(
                "create_graph=True goes back through a partition that is recomputed, whose "
                "gradients have no graph; use checkpoint='never'"
            )
        if self.graph is None:  # a second backward
            self._group.recompute(False)
        assert self.graph is not None
        (xs, ys), self.graph = self.graph, None
        pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if dy is not None]
        ys, gradients = zip(*pairs, strict=True)
        in_step = self._group.in_step
        # A leaf frozen since the forward gets no gradient, as without checkpointing.
        needed = [True] * len(xs) + [leaf.requires_grad for leaf in ctx.leaves]
        if in_step is None:
            needed = list(map(operator.and_, needed, are_needed(ctx.next_functions)))
        wanted: list[Any] = [*compress((*xs, *ctx.leaves), needed)]
        if in_step is not None:
            found = in_step(ctx, ys, wanted, gradients)
        else:
            found = hiding_partial_gradients(ctx.leaves, differentiate, ys, wanted, gradients)
        rest = iter(found)
        return [next(rest) if is_needed else None for is_needed in needed]

    def _take(self, number: int) -> Tensor:
        """Return the tensor that ``F`` saved as ``number``, recomputing if necessary (rule 5)."""
        if self._saves < 0:
            refuse(number)
        if number not in self._saved:
            self._group.recompute(False, None if self.keeps_graph() else self)
        tensor, before = self._saved.pop(number)
        if tensor._version != before:
            raise RuntimeError(
                f"a tensor needed for gradient computation, {describe(tensor)}, was modified in "
                "place by a later operation of the same partition; clone it there"
            )
        return tensor


def _hooks(tensors: Tensors) -> list[int]:
    """Return how many hooks each of those tensors has that require grad."""
    return [len(tensor_hooks(x) or ()) + x.retains_grad for x in tensors if x.requires_grad]


def _refuse_changes(tensors: Tensors, before: list[int]) -> None:
    for tensor, old, now in zip(tensors, before, versions(tensors), strict=True):
        if old != now:
            raise RuntimeError(
                f"a layer changes its argument in place ({describe(tensor)}), which cannot be "
                "undone when it is recomputed; use inplace=False there, a cut outside of the "
                "module that calls it, or checkpoint='never'"
            )


_HOOK = (
    "a layer registers a hook on its argument, or retains its gradient, and would do so again when "
    "it is recomputed; do that with a clone in the layer, in the model's own code, or use "
    "checkpoint='never'"
)
