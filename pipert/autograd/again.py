"""Computing again: from ``F[i,j]``, whose graph saves nothing, to the graph of ``R[i,j]``.

The non-reentrant way to checkpoint keeps the graph of the forward without its data, and fills the
data in when it is computed again: a Python object is made, filled and read for each saved tensor,
which costs as much as a small operation does. So:

1. ``F[i,j]`` runs with grad enabled, as layers expect, and its graph saves numbers in place of
   tensors. What stays are the inputs.
2. ``R[i,j]`` computes them again, as ``F`` of a micro-batch that is not checkpointed, and keeps the
   graph. ``B[i,j]`` differentiates that.
3. ``R`` must do what ``F`` did. That its outputs are alike and that it has made as many nodes costs
   nothing to know. Where the number differs, ``R`` runs once more to count what it saves: a
   compiler or a cache has more to do the first time, and saves the same.
4. The inputs are kept as they were before the partition ran: the layers get copies, so that an
   in-place first layer cannot corrupt them. If anything else has changed them they are refused, as
   autograd does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.hooks import Forget, Hook, Hooks, refuse, refuse_transform, without_hooks
from pipert.autograd.leaves import node_count
from pipert.batch.tensors import describe, differentiable, tensors_of, version
from pipert.errors import RecomputationError

__all__: list[str] = []

Edges = tuple[GradientEdge, ...]
Look = tuple[torch.Size, torch.dtype]
Replay = Callable[[Callable[[], Value], Callable[[Value], None], bool], None]


class Graph(NamedTuple):
    """A graph within one stage: its two ends, and no values, which may be large.

    What the backward reads of the inputs and outputs themselves, the graph has saved.
    """

    xs: Edges
    """Inputs that want a gradient, those of arriving skips behind those of the value."""
    ys: Edges
    """Outputs that get one, those of leaving skips behind those of the value; or the loss."""


def edges_of(tensors: Tensors) -> Edges:
    """Where they are in the graph, which stays alive without them."""
    return tuple([order.edge_of(tensor) for tensor in tensors])


class First(NamedTuple):
    """What came out of a computation the first time."""

    xs: Tensors
    """Inputs that want a gradient."""
    begins: list[Node]
    """Of each the node behind which the graph begins."""
    ys: Tensors
    """Outputs that get one."""
    rebuild: Callable[[Tensors], Value]
    """Puts others in their place in the output."""
    nodes: range
    """The numbers of the nodes that it has made."""


class Again:
    """What it takes to compute one task again. References no run, no thread and no graph.

    Args:
        replay: puts on the context of the first time, grad enabled included, asks the first
            function it is given for the input value, computes the task again with the same random
            numbers, and calls the second with the output; the flag says whether it is on a worker,
            under the context already.
        hooks: the saved-tensor hooks ``(pack, unpack)`` of the caller, which see what ``R`` saves.
    """

    __slots__ = (
        "__weakref__", "_looks", "_nodes", "_rebuild", "_do", "_tensors", "_versions",
        "_wanting", "hooks", "saves",
    )  # fmt: skip

    def __init__(self, replay: Replay | None, hooks: Hooks) -> None:
        self._do = replay
        self.hooks = hooks

    def first(self, compute: Callable[[Value], Value], value: Value, unpack: Hook) -> First:
        """Compute the first time, and save nothing.

        Args:
            compute: computes the task.
            value: the input, any pytree.
            unpack: gets the number of a saved tensor, if the graph is gone through after all.
        """
        tensors, self._rebuild = tensors_of(value)
        self._wanting = []
        own, xs, begins = self._keep(tensors), list[Tensor](), list[Node]()
        for k, tensor in enumerate(tensors):
            if (node := own[k].grad_fn) is not None:
                self._wanting.append(k)
                xs.append(tensor)
                begins.append(node)
        forget = Forget(next, saved := count())
        forget.hooks = self.hooks
        before = node_count()
        with torch.autograd.graph.saved_tensors_hooks(forget, unpack):
            try:
                y = compute(self._rebuild(tuple(own)))
            except RuntimeError as error:
                refuse_transform(error)
                raise
        nodes = range(before, node_count())
        ys, rebuild = differentiable(y)
        self._nodes, self.saves, self._looks = len(nodes), next(saved), list(map(_look, ys))
        return First(tuple(xs), begins, ys, rebuild, nodes)

    def connections(self, xs: Tensors) -> Tensors:
        """What is kept of inputs that want a gradient, for the sake of their graph."""
        return xs

    def fresh(self, begin: Callable[[Tensors], Tensors] | None = None) -> Value:
        """Return the input with copies, no leaves, which layers may change in place.

        Args:
            begin: begins the graph, from detached tensors that want a gradient; ``None``: they are
                its leaves.

        Raises:
            RuntimeError: an input was changed in place.
        """
        tensors = self._kept()
        wanting = tuple([tensors[k] for k in self._wanting])
        if begin is None:
            for tensor in wanting:
                tensor.requires_grad_()
        elif wanting:
            for k, tensor in zip(self._wanting, begin(wanting), strict=True):
                tensors[k] = tensor
        return self._rebuild(self._given(tensors))

    def _keep(self, tensors: Tensors) -> list[Tensor]:
        """Keep the inputs as they are now; return what the layers get, which is no leaf."""
        self._tensors, self._versions, own = [], [], []
        for tensor in tensors:
            self._tensors.append(tensor.detach())
            self._versions.append(-1 if tensor.is_inference() else tensor._version)
            own.append(tensor.clone())
        return own

    def _kept(self) -> list[Tensor]:
        """The inputs, without a graph."""
        for tensor, before in zip(self._tensors, self._versions, strict=True):
            refuse_changed(tensor, before)
        return [tensor.detach() for tensor in self._tensors]

    def _given(self, tensors: Sequence[Tensor]) -> Tensors:
        """What the layers get when they compute again."""
        return tuple(map(Tensor.clone, tensors))

    def compute(
        self, on_worker: bool, begin: Callable[[Tensors], Tensors] = order.enter
    ) -> Graph:
        """Compute again, and return the graph.

        Raises:
            RecomputationError: the layers have done something else than the first time.
        """
        xs: Edges = ()
        ys: Edges = ()
        before = nodes = 0

        def enter() -> Value:
            nonlocal before, xs
            value = self.fresh(begin)
            xs = edges_of(differentiable(value)[0])
            before = node_count()
            return value

        def leave(y: Value) -> None:
            nonlocal nodes, ys
            nodes = node_count() - before
            outputs = differentiable(y)[0]
            self._check(outputs)
            ys = edges_of(outputs)

        with contextlib.nullcontext() if on_worker else without_hooks():
            self._replay(enter, leave, on_worker)
        if nodes != self._nodes:
            self._count_what_is_saved(on_worker)
        return Graph(xs, ys)

    def saved(self, on_worker: bool) -> dict[int, tuple[Any, int]]:
        """Compute again, and return what it saves, by number: packed by the caller, and versions.

        Raises:
            RecomputationError: the layers have done something else than the first time.
        """
        found: dict[int, tuple[Any, int]] = {}

        def keep(tensor: Tensor) -> None:
            kept = tensor.detach()
            pack = self.hooks[0] if self.hooks else None
            found[len(found)] = (kept if pack is None else pack(kept), tensor._version)

        def check(y: Value) -> None:
            self._check(differentiable(y)[0])
            self._check_count(len(found))

        self._replay_under(Forget(keep), check, on_worker)
        return found

    def _replay(
        self, get_value: Callable[[], Value], check: Callable[[Value], None], on_worker: bool
    ) -> None:
        assert self._do is not None
        self._do(get_value, check, on_worker)

    def _count_what_is_saved(self, on_worker: bool) -> None:
        saved = count()

        def check(_: Value) -> None:
            self._check_count(next(saved))

        self._replay_under(Forget(next, saved), check, on_worker)

    def _replay_under(self, pack: Forget, check: Callable[[Value], None], on_worker: bool) -> None:
        pack.hooks = self.hooks
        with torch.autograd.graph.saved_tensors_hooks(pack, refuse):
            self._replay(self.fresh, check, on_worker)

    def _check(self, outputs: Tensors) -> None:
        if list(map(_look, outputs)) != self._looks:
            looks = [f"{str(dtype)[6:]}{list(shape)}" for shape, dtype in self._looks]
            raise RecomputationError(
                f"a recomputation returned {describe(outputs)} and its forward "
                f"({', '.join(looks)}){_REMEDY}"
            )

    def _check_count(self, saved: int) -> None:
        if saved != self.saves:
            raise RecomputationError(
                f"a recomputation saved {saved} tensors and its forward {self.saves}{_REMEDY}"
            )

    def __repr__(self) -> str:
        return f"<Again of {len(self._tensors)} inputs>"


def refuse_changed(tensor: Tensor, before: int) -> None:
    """Refuse an input that was changed since it had the version ``before``."""
    if version(tensor) != before:
        raise RuntimeError(
            "an input of a checkpointed partition was modified in place between its forward and "
            f"its recomputation: {describe(tensor)}; clone it before modifying it"
        )


_look: Callable[[Tensor], Look] = attrgetter("shape", "dtype")

_REMEDY = (
    "; layers must do the same when they run again: no counters, no random numbers from a "
    "generator of their own, no dependence on what the training loop changes, no parameter frozen "
    "or released in between. Otherwise use checkpoint='never'"
)
