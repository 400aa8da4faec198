"""A segment: what ``R[i,j]`` repeats as a whole, from ``F[i,j]`` to the graph of ``R[i,j]``.

The standard non-reentrant checkpoint keeps the graph of the forward without its saved tensors, and
the recomputation fills them in. It creates, fills and reads a Python object per saved tensor, which
costs as much as a small operation. So:

1. ``F[i,j]`` runs with grad enabled, as layers expect, and its graph saves numbers in place of
   tensors. Only the inputs are saved. One node takes the place of the graph.
2. ``R[i,j]`` computes the segment again, exactly like ``F`` of a micro-batch that is not
   checkpointed, and keeps the graph. ``B[i,j]`` differentiates it.
3. ``R`` must do what ``F`` did: whoever calls the layers compares their outputs.
4. An input that is the unchanged output of an earlier segment is not saved, but taken from the
   repetition of that segment. Other inputs are saved as they were before the segment ran. One that
   anything has changed since is refused, as autograd would.
5. A hook may have captured a tensor of ``F``'s graph for a loss, as the models of transformers
   capture the logits of a router. A backward from there reads a number in place of a saved tensor:
   the segment is computed once more, on the spot, and the tensors that it saves are counted. Where
   a layer uses a graph of the caller's, all of ``F``'s graph stays, and goes back that way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipert._torch import node_count, tensor_hooks
from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.checkpoint import are_needed, through_checkpoint
from pipert.autograd.engine import differentiate
from pipert.autograd.hooks import (
    DropSaved,
    Hooks,
    hiding_partial_gradients,
    refuse,
    refuse_transform,
)
from pipert.autograd.leaves import origins
from pipert.batch.tensors import describe, differentiable, tensors_of, versions
from pipert.errors import RecomputationError

Edges = tuple[GradientEdge, ...]


class Graph(NamedTuple):
    """The two ends of a graph within one stage, without the values there, which may be large.

    Whatever the backward needs of those values, the graph has saved.
    """

    xs: Edges
    """The differentiable inputs; those of arriving skips follow those of the value."""
    ys: Edges
    """The differentiable outputs; those of leaving skips follow those of the value. Or the loss."""


def edges_of(tensors: Tensors) -> Edges:
    """Return the tensors' positions in the graph, which keep it alive without the tensors."""
    return tuple(map(order.edge_of, tensors))


Made = tuple[Callable[[], Tensor | None], int, "Callable[[], Segment | None]", int]
"""An output of a segment: the tensor, by a weak reference, its version, the segment, likewise, and
the output's index."""


class Group(Protocol):
    """The segments that are recomputed together, in one ``R[i,j]``."""

    hooks: Hooks
    """The caller's saved-tensor hooks ``(pack, unpack)``, which see what ``R`` saves."""
    in_step: Callable[..., Sequence[Tensor | None]] | None
    """Differentiates a graph in ``B[i,j]`` of a step, which asks for all gradients."""

    def recompute(self, on_worker: bool, to_fill: Segment | None = None) -> None:
        """Recompute all segments of the group, or what ``F`` of one of them has saved."""


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
        "__weakref__", "_again", "_copies", "_graph", "_group", "_origins", "_rebuild",
        "_saved", "_saves", "_tensors", "_versions", "_wanting", "is_pair", "is_used", "outputs",
    )  # fmt: skip

    def __init__(self, group: Group, again: Callable[[Value], Value], copies: bool) -> None:
        self._group = group
        self._again = again
        self._copies = copies
        self._graph: Graph | None = None  # R's, until B
        self._saved: dict[int, tuple[Tensor, int]] = {}  # for F's graph
        self.is_pair = False
        """Whether one node has taken the place of the graph."""
        self._saves = -1  # until the first computation is over
        self.is_used = False
        """Whether a later segment takes an output."""
        self.outputs: Tensors = ()
        """The outputs of the current repetition, if they are used."""

    def record(
        self,
        compute: Callable[[Value], Value],
        value: Value,
        made: dict[int, Made],
        copies: Callable[[], Iterable[Tensor]],
    ) -> Value:
        """Run ``compute(value)``, and replace its graph by one node if possible (rules 1 and 5).

        Args:
            compute: computes the segment for the first time.
            value: the input, any pytree.
            made: the outputs of earlier segments, by id.
            copies: returns the copies of weights on other devices that ``compute`` may use.

        Raises:
            RuntimeError: a layer has changed an input, or put a hook on it.
        """
        tensors, self._rebuild = tensors_of(value)
        states = _states(tensors, not self._copies)
        inputs, xs, begins = self._save(tensors, states[0], made)
        forget = DropSaved(next, saves := count())
        forget.hooks = self._group.hooks
        before = node_count()
        with torch.autograd.graph.saved_tensors_hooks(forget, self._take):
            try:
                y = compute(self._rebuild(inputs) if self._copies else value)
            except RuntimeError as error:
                refuse_transform(error)
                raise
        ys, rebuild = differentiable(y)
        made_here = range(before, node_count())
        self._saves = next(saves)
        if found := origins(ys, begins, copies(), made_here) if ys else None:
            self.is_pair = True
            ys = through_checkpoint(self, ys, xs, *found)
        if not self._copies and (now := _states(tensors, True)) != states:
            _refuse_changes(tensors, states, now)
        return rebuild(ys)

    def _save(
        self, tensors: Tensors, versions: list[int], made: dict[int, Made]
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

    def _fresh(self) -> tuple[Value, Tensors]:
        """Return the input, and its differentiable tensors, which are leaves.

        Raises:
            RuntimeError: an input was changed in place.
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
        xs = tuple([tensors[k] for k in self._wanting])
        for x in xs:
            x.requires_grad_()
        inputs = [*map(Tensor.clone, tensors)] if self._copies else tensors
        return self._rebuild(tuple(inputs)), xs

    def _compute(self, value: Value) -> Value:
        y = self._again(value)
        if self.is_used:
            self.outputs = tensors_of(y)[0]
        return y

    def build(self) -> Graph:
        """Compute the segment again and return its graph.

        Raises:
            RecomputationError: the layers did something else than the first time.
        """
        value, tensors = self._fresh()
        xs = edges_of(tensors)
        del tensors
        return Graph(xs, edges_of(differentiable(self._compute(value))[0]))

    def fill(self) -> None:
        """Compute the segment again, and keep the tensors that it saves, with their versions.

        Raises:
            RecomputationError: it saved another number of tensors than the first time.
        """
        found = list[tuple[Tensor, int]]()

        def keep(tensor: Tensor) -> None:
            found.append((tensor.detach(), tensor._version))

        forget = DropSaved(keep)
        forget.hooks = self._group.hooks
        with torch.autograd.graph.saved_tensors_hooks(forget, refuse):
            self._compute(self._fresh()[0])
        if len(found) != self._saves:
            raise RecomputationError(
                f"a recomputation saved {len(found)} tensors and its forward {self._saves}{REMEDY}"
            )
        self._saved = dict(enumerate(found))

    def recompute(self) -> None:
        """Compute the segment again, and keep what the next backward needs."""
        if self.is_pair or self.is_used:
            self._graph = self.build()

    @property
    def is_missing(self) -> bool:
        """Whether a backward must recompute first."""
        return self._graph is None

    def differentiate(self, dys: Sequence[Tensor | None], ctx: Any) -> list[Tensor | None]:
        """Return the needed gradients of inputs and leaves, given those of the outputs."""
        if torch.is_grad_enabled():
            raise RecomputationError(
                "create_graph=True goes back through a partition that is recomputed, whose "
                "gradients have no graph; use checkpoint='never'"
            )
        if self._graph is None:  # a second backward
            self._group.recompute(False)
        assert self._graph is not None
        graph, self._graph = self._graph, None
        pairs = [(y, dy) for y, dy in zip(graph.ys, dys, strict=True) if dy is not None]
        ys, gradients = zip(*pairs, strict=True)
        in_step = self._group.in_step
        # A leaf frozen since the forward gets no gradient, as without checkpointing.
        needed = [True] * len(graph.xs) + [leaf.requires_grad for leaf in ctx.leaves]
        if in_step is None:
            needed = list(map(operator.and_, needed, are_needed(ctx.next_functions)))
        wanted: list[Any] = [*compress((*graph.xs, *ctx.leaves), needed)]
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
            self._group.recompute(False, self)
        tensor, before = self._saved.pop(number)
        if tensor._version != before:
            raise RuntimeError(
                f"a tensor needed for gradient computation, {describe(tensor)}, was modified in "
                "place by a later operation of the same partition; clone it there"
            )
        return tensor


_States = tuple[list[int], list[int]]


def _states(tensors: Tensors, with_hooks: bool) -> _States:
    """Return the versions of tensors, and how many hooks those have that require grad."""
    hooks = list[int]()
    for tensor in tensors if with_hooks else ():
        if tensor.requires_grad:
            hooks.append(len(tensor_hooks(tensor) or ()) + tensor.retains_grad)
    return versions(tensors), hooks


def _refuse_changes(tensors: Tensors, before: _States, now: _States) -> None:
    if before[0] == now[0]:
        raise RuntimeError(
            "a layer registers a hook on its argument, or retains its gradient, and would "
            "do so again when it is recomputed; do that with a clone in the layer, in the "
            "model's own code, or use checkpoint='never'"
        )
    changed = next(x for x, old, new in zip(tensors, before[0], now[0], strict=True) if old != new)
    raise RuntimeError(
        f"a layer changes its argument in place ({describe(changed)}), which cannot be undone when "
        "it is recomputed; use inplace=False there, a cut outside of the module that calls it, or "
        "checkpoint='never'"
    )


REMEDY = (
    "; layers must do the same when they run again: no counters, no random numbers from a "
    "generator of their own, no buffer or mode that has changed, no dependence on what the "
    "training loop changes, no parameter frozen or released in between. Otherwise exempt "
    "the layer with pipert.never_recompute, or use checkpoint='never'"
)
