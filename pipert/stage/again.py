"""Computing a micro-batch of a step again: from ``F[i,j]``, whose graph is dropped, to ``R[i,j]``.

The standard way to checkpoint, as in a call, is to keep the graph of the forward without its data,
and to fill the data in. That is what autograd's own walk along one graph needs, and costs a Python
object for each saved tensor. In a step nobody but ``B[i,j]`` walks, so:

1. ``F[i,j]`` runs with grad enabled, as layers expect, and saves nothing: its graph goes when it
   has returned. What stays are its inputs.
2. ``R[i,j]`` computes them again, as ``F`` of a micro-batch that is not checkpointed, and keeps the
   graph. ``B[i,j]`` differentiates that.
3. ``R`` must do what ``F`` did. That its outputs are alike and its graph has as many nodes is all
   that costs nothing to know. Where the number differs, ``R`` runs once more to count what it
   saves: a compiler's or a cache's first run makes more nodes, and saves the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.checkpoint import REMEDY, Forget, Hook, Replay, refuse
from pipert.autograd.inputs import Inputs
from pipert.autograd.leaves import node_count
from pipert.batch.tensors import describe, differentiable
from pipert.errors import RecomputationError

__all__: list[str] = []

Edges = tuple[GradientEdge, ...]
Hooks = tuple[Hook, Hook] | None


class Graph(NamedTuple):
    """A graph within one stage: its two ends, and no values, which may be large.

    What the backward reads of the inputs and outputs themselves, the graph has saved.
    """

    xs: Edges
    """Inputs that want a gradient, those of arriving skips behind those of the value."""
    ys: Edges
    """Outputs that get one, those of leaving skips behind those of the value; or the loss."""
    nodes: int
    """How many the worker has made meanwhile; with those of a compiler, and of dead branches."""


def edges_of(tensors: Tensors) -> Edges:
    """Where they are in the graph, which stays alive without them."""
    return tuple([order.edge_of(tensor) for tensor in tensors])


class Again:
    """What ``R[i,j]`` needs of ``F[i,j]``. It references neither the run nor a graph.

    Args:
        replay: computes the layers again, as of ``autograd.checkpoint``.
        value: the input, any pytree.
        hooks: the caller's saved-tensor hooks, which see what ``R`` saves.
    """

    __slots__ = ("_hooks", "_inputs", "_nodes", "_replay", "_saved", "_ys")

    def __init__(self, replay: Replay, value: Value, hooks: Hooks) -> None:
        self._replay = replay
        self._inputs = Inputs(value)
        self._hooks = hooks
        self._nodes = self._saved = 0
        self._ys: list[tuple[torch.Size, torch.dtype]] = []

    def first(self, compute: Callable[[Value], Value]) -> Value:
        """Compute without keeping a graph; return the output, of leaves."""
        value, saved = self._inputs.fresh(), count()
        before = node_count()
        with self._forgetting(saved):
            y = compute(value)
        self._nodes, self._saved = node_count() - before, next(saved)
        ys, rebuild = differentiable(y)
        self._ys = list(map(_look, ys))
        return rebuild(tuple([tensor.detach().requires_grad_() for tensor in ys]))

    def compute(self) -> Graph:
        """Compute again, and return the graph.

        Raises:
            RecomputationError: the layers have done something else than the first time.
        """
        xs: Edges = ()
        ys: Edges = ()
        before = nodes = 0

        def enter() -> Value:
            nonlocal before, xs
            value = self._inputs.fresh(order.enter)
            xs = edges_of(differentiable(value)[0])
            before = node_count()
            return value

        def leave(y: Value) -> None:
            nonlocal nodes, ys
            nodes = node_count() - before
            outputs = differentiable(y)[0]
            if list(map(_look, outputs)) != self._ys:
                raise RecomputationError(
                    f"a recomputation returned {describe(outputs)} and its forward "
                    f"{[f'{dtype}{list(shape)}' for shape, dtype in self._ys]}{REMEDY}"
                )
            ys = edges_of(outputs)

        self._replay(enter, leave, True)
        if nodes != self._nodes:
            self._count_what_is_saved()
        return Graph(xs, ys, nodes)

    def _count_what_is_saved(self) -> None:
        saved = count()

        def check(_: Value) -> None:
            if (number := next(saved)) != self._saved:
                raise RecomputationError(
                    f"a recomputation saved {number} tensors and its forward {self._saved}{REMEDY}"
                )

        with self._forgetting(saved):
            self._replay(self._inputs.fresh, check, True)

    def _forgetting(self, saved: count[int]) -> AbstractContextManager[None]:
        forget = Forget(next, saved)
        forget.hooks = self._hooks
        return torch.autograd.graph.saved_tensors_hooks(forget, refuse)

    def __repr__(self) -> str:
        return f"<Again of {self._inputs!r}>"


def _look(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
