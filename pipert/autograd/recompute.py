"""Recomputes a task: from ``F[i,j]``, whose graph saves no tensors, to the graph of ``R[i,j]``.

The standard non-reentrant checkpoint keeps the graph of the forward without its saved tensors, and
the recomputation fills them in. It creates, fills and reads a Python object per saved tensor, which
costs as much as a small operation. So:

1. ``F[i,j]`` runs with grad enabled, as layers expect, and its graph saves numbers in place of
   tensors. Only the inputs are kept.
2. ``R[i,j]`` computes the task again, exactly like ``F`` of a micro-batch that is not checkpointed,
   and keeps the graph. ``B[i,j]`` differentiates it.
3. ``R`` must do what ``F`` did. Who calls the layers compares their outputs. Here the number of
   nodes is compared, which costs nothing. Where it differs, ``R`` runs once more to count the
   tensors it saves: a compiler or a cache does more work the first time, but saves the same
   tensors. Other kernels for attention may save others, but where ``F``'s graph stays.
4. The inputs are kept as they were before the partition ran: the layers get copies, so that an
   in-place first layer cannot corrupt them. An input that anything else has changed is refused, as
   autograd would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import node_count
from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.hooks import Forget, Hook, Hooks, refuse, refuse_transform, without_hooks
from pipert.batch.tensors import describe, differentiable, tensors_of, version
from pipert.errors import RecomputationError

Edges = tuple[GradientEdge, ...]
Replay = Callable[[Callable[[], Value], Callable[[Value], None], bool], None]


other_kernels = ContextVar[Callable[[], str]]("pipert_other_kernels", default=str)
"""Tells which kernels have been enabled or disabled since the forward; none if it returns ''."""


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


class First(NamedTuple):
    """The result of a task's first computation."""

    xs: Tensors
    """The differentiable inputs."""
    begins: list[Node]
    """For each of them, the node at which the task's graph begins."""
    ys: Tensors
    """The differentiable outputs."""
    rebuild: Callable[[Tensors], Value]
    """Returns the output with ``ys`` replaced by other tensors."""
    nodes: range
    """The numbers of the nodes that the task created."""


class Recomputation:
    """All that is needed to compute one task again. References no run, no thread and no graph.

    Args:
        replay: restores the context of the first computation, grad mode included, gets the input
            value from its first argument, computes the task again with the same random numbers,
            and passes the output to its second argument; the flag says whether it is called on a
            worker, where the context is already in place.
        hooks: the caller's saved-tensor hooks ``(pack, unpack)``, which see what ``R`` saves.
        is_whole: whether ``R`` computes all that ``F`` does, so that its graph can replace ``F``'s.
    """

    __slots__ = (
        "__weakref__", "_nodes", "_rebuild", "_replay_task", "_tensors", "_versions",
        "_wanting", "hooks", "is_whole", "saves",
    )  # fmt: skip

    def __init__(self, replay: Replay | None, hooks: Hooks, is_whole: bool = True) -> None:
        self._replay_task = replay
        self.hooks = hooks
        self.is_whole = is_whole

    def first(self, compute: Callable[[Value], Value], value: Value, unpack: Hook) -> First:
        """Compute the task for the first time, saving no tensors.

        Args:
            compute: computes the task.
            value: the input, any pytree.
            unpack: receives the number of a saved tensor if a backward reads this graph after all.
        """
        tensors, self._rebuild = tensors_of(value)
        self._wanting = []
        given, xs, begins = self._keep(tensors), list[Tensor](), list[Node]()
        for k, tensor in enumerate(tensors):
            if given[k].requires_grad:
                self._wanting.append(k)
                xs.append(tensor)
                begins.append(given[k].grad_fn or order.edge_of(tensor).node)
        forget = Forget(next, saved := count())
        forget.hooks = self.hooks
        before = node_count()
        with torch.autograd.graph.saved_tensors_hooks(forget, unpack):
            try:
                y = compute(self._rebuild(tuple(given)))
            except RuntimeError as error:
                refuse_transform(error)
                raise
        nodes = range(before, node_count())
        ys, rebuild = differentiable(y)
        self._nodes, self.saves = len(nodes), next(saved)
        return First(tuple(xs), begins, ys, rebuild, nodes)

    def connections(self, xs: Tensors) -> Tensors:
        """Return the tensors that keep the task connected to the graph of its inputs ``xs``."""
        return xs

    def fresh(self, begin: Callable[[Tensors], Tensors] | None = None) -> tuple[Value, Tensors]:
        """Return the input with non-leaf copies of its tensors, and the differentiable ones.

        Args:
            begin: begins the graph with the detached differentiable inputs; by default they are
                leaves of it.

        Raises:
            RuntimeError: an input was changed in place.
        """
        tensors = self._kept(begin is order.enter)
        detached = [k for k in self._wanting if not tensors[k].requires_grad]
        if begin is None:
            for k in detached:
                tensors[k].requires_grad_()
        elif detached:
            begun = begin(tuple([tensors[k] for k in detached]))
            for k, tensor in zip(detached, begun, strict=True):
                tensors[k] = tensor
        xs = tuple([tensors[k] for k in self._wanting])
        return self._rebuild(self._given(tensors)), xs

    def _keep(self, tensors: Tensors) -> list[Tensor]:
        """Keep the inputs as they are now; return the tensors to give the layers."""
        self._tensors, self._versions, given = [], [], []
        for tensor in tensors:
            self._tensors.append(tensor.detach())
            self._versions.append(-1 if tensor.is_inference() else tensor._version)
            given.append(tensor.clone())
        return given

    def _kept(self, goes_on: bool) -> list[Tensor]:
        """Return the kept inputs, detached; refuse any that was changed in place.

        Args:
            goes_on: whether those that an earlier recomputation has made are to begin a graph.
        """
        for tensor, before in zip(self._tensors, self._versions, strict=True):
            refuse_changed(tensor, before)
        return [tensor.detach() for tensor in self._tensors]

    def _given(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return the tensors to give the layers in a recomputation."""
        return tuple(map(Tensor.clone, tensors))

    def compute(
        self, on_worker: bool, begin: Callable[[Tensors], Tensors] = order.enter
    ) -> Graph:
        """Compute the task again and return its graph.

        Raises:
            RecomputationError: the layers did something else than the first time.
        """
        xs: Edges = ()
        ys: Edges = ()
        before, is_other = 0, False

        def enter() -> Value:
            nonlocal xs, before
            value, tensors = self.fresh(begin)
            xs, before = edges_of(tensors), node_count()
            return value

        def leave(y: Value) -> None:
            nonlocal ys, is_other
            is_other = node_count() - before != self._nodes and not other_kernels.get()()
            ys = edges_of(differentiable(y)[0])

        with contextlib.nullcontext() if on_worker else without_hooks():
            self._replay(enter, leave, on_worker)
        if is_other:
            self.saved(on_worker)  # counts them
        return Graph(xs, ys)

    def saved(self, on_worker: bool) -> dict[int, tuple[Any, int]]:
        """Compute the task again and return the tensors it saves, by number, with their versions.

        If the caller has saved-tensor hooks, the tensors are packed by them.

        Raises:
            RecomputationError: the layers did something else than the first time.
        """
        found: dict[int, tuple[Any, int]] = {}

        def keep(tensor: Tensor) -> None:
            kept = tensor.detach()
            pack = self.hooks[0] if self.hooks else None
            found[len(found)] = (kept if pack is None else pack(kept), tensor._version)

        def check(_: Value) -> None:
            if len(found) != self.saves:
                raise RecomputationError(
                    f"a recomputation saved {len(found)} tensors and its forward {self.saves}"
                    f"{REMEDY}"
                )
            if changed := other_kernels.get()():  # those of F's graph may crash
                raise RecomputationError(
                    f"{changed}, as torch.nn.attention.sdpa_kernel does if it is around one of "
                    "forward and backward only; put loss.backward() into the same block, or use "
                    "checkpoint='never'"
                )

        forget = Forget(keep)
        forget.hooks = self.hooks
        with torch.autograd.graph.saved_tensors_hooks(forget, refuse):
            self._replay(lambda: self.fresh()[0], check, on_worker)
        return found

    def _replay(
        self, get_value: Callable[[], Value], check: Callable[[Value], None], on_worker: bool
    ) -> None:
        assert self._replay_task is not None
        self._replay_task(get_value, check, on_worker)

    def __repr__(self) -> str:
        return f"<Recomputation of {len(self._tensors)} inputs>"


def refuse_changed(tensor: Tensor, before: int) -> None:
    """Refuse an input that was modified in place since it had version ``before``."""
    if version(tensor) != before:
        raise RuntimeError(
            "an input of a checkpointed partition was modified in place between its forward and "
            f"its recomputation: {describe(tensor)}; clone it before modifying it"
        )


REMEDY = (
    "; layers must do the same when they run again: no counters, no random numbers from a "
    "generator of their own, no buffer or mode that has changed, no dependence on what the "
    "training loop changes, no parameter frozen or released in between. Otherwise exempt "
    "the layer with pipert.never_recompute, or use checkpoint='never'"
)
