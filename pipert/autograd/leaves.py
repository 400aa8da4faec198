"""Leaves: which ones a graph is made of, and how functions take them without a deadlock.

torch (2.13) looks up the ``AccumulateGrad`` of a leaf, or makes it, while it holds the leaf's lock,
and may take the interpreter's lock meanwhile: to make it, or if Python alone holds it. A
``Function`` in Python is applied in the opposite order: it has the interpreter's lock and waits for
the leaf's. Two threads that do both deadlock, without a pipe as well. So before a function of ours
is applied to a leaf, a view of the leaf makes the ``AccumulateGrad``, which waits without the
interpreter's lock, and holds it in C++ until the function was applied: a lookup is all that others
do then. No Python object of the node is made, which would be enough for a lookup to need the
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

__all__: list[str] = []

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def accumulators(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns what holds those of the leaves: keep it while a function is applied to them."""
    leaves = [x for x in tensors if x.is_leaf and x.requires_grad and x.layout == torch.strided]
    if not leaves:
        return []
    with torch.enable_grad():
        return [leaf.view_as(leaf) for leaf in leaves]


node_count: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node gets which the current thread makes."""


def leaves_behind(ends: Iterable[Node], known: Iterable[Tensor] = ()) -> list[Tensor]:
    """The leaves that graphs with these ends are made of, but for those that are known.

    Not only parameters of layers: a layer may train a tensor that it keeps for itself.
    """
    seen: set[Any] = {*ends, None}
    left: list[Any] = [*seen - {None}]
    found, leaves = {id(leaf) for leaf in known}, list[Tensor]()
    while left:  # some microseconds a node in Python, so this does not look at more than it must
        node = left.pop()
        below = node.next_functions
        if not below and type(node) is _AccumulateGrad:
            leaf = node.variable
            if id(leaf) not in found and leaf.requires_grad:
                found.add(id(leaf))
                leaves.append(leaf)
        for child, _ in below:
            if child not in seen:
                seen.add(child)
                left.append(child)
    return leaves


def origins(ys: Iterable[Tensor], begins: Iterable[Node], made: range) -> list[Tensor] | None:
    """The leaves of a graph that is a function of them and of what came out of ``begins``.

    Args:
        ys: what it made.
        begins: nodes that it begins behind.
        made: the numbers of its nodes.

    Returns:
        ``None`` if it is more: it has nodes of another graph, or written in Python, which may call
        the engine; leaves whose hooks would see a part of their gradient; or it made a leaf.
    """
    seen: set[Any] = {*begins, None}
    left: list[Any] = []
    for y in ys:
        if y.grad_fn is None:
            return None
        if y.grad_fn not in seen:
            seen.add(y.grad_fn)
            left.append(y.grad_fn)
    numbers, leaves = set[int](), list[Tensor]()
    while left:
        node = left.pop()
        below = node.next_functions
        if not below and type(node) is _AccumulateGrad:
            leaf = node.variable
            if leaf._backward_hooks:
                return None
            if leaf.requires_grad:
                leaves.append(leaf)
            continue
        number = node._sequence_nr()
        if number not in made or number in numbers:  # another thread's may look like ours
            return None
        if isinstance(node, BackwardCFunction):
            return None
        numbers.add(number)
        for child, _ in below:
            if child not in seen:
                seen.add(child)
                left.append(child)
    return leaves


class LeavesOfStage:
    """The leaves of the graphs of one stage in one run, looked for in few of them.

    1. The first graph is walked, and each that has another number of nodes than those before.
    2. One that has as many nodes as one before is taken to be made of parameters of the partition,
       any of them: a mixture of experts may use others each time. That is a wider net than what is
       in the graph.
    3. If a walk finds anything else, such as a tensor that the loss function trains, a count of
       nodes says too little, and each graph is walked.

    """

    __slots__ = ("_counts", "_everything", "_walked")

    def __init__(self) -> None:
        self._counts: set[int] = set()
        self._walked: list[Tensor] = []
        self._everything: Sequence[Tensor] | None = None  # unknown; empty: not only parameters

    def behind(
        self,
        ends: Iterable[Node],
        count: int,
        known: Iterable[Tensor],
        parameters: Callable[[], Iterable[Tensor]],
    ) -> Sequence[Tensor]:
        """Return the leaves of the graph with these ends and so many nodes, and maybe more.

        Args:
            ends: nodes of the outputs.
            count: the number of nodes.
            known: leaves that are left out.
            parameters: those of the partition, or what stands for them.
        """
        if count in self._counts and self._everything is None:
            everything = dict.fromkeys([x for x in parameters() if x.requires_grad])
            self._everything = () if set(self._walked) - everything.keys() else [*everything]
            self._walked = []
        if count in self._counts and self._everything:
            return self._everything
        leaves = leaves_behind(ends, known)
        self._counts.add(count)
        if self._everything is None:
            self._walked += leaves
        elif set(leaves) - set(self._everything):
            self._everything = ()
        return leaves
