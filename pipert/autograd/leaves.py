"""Leaves: which ones a graph is made of, and how functions take them without a deadlock.

A graph of a task goes on in one of the caller's where the task uses a tensor that the caller has
computed, such as a learned temperature. Nodes have numbers, but each thread counts for itself, so a
thread that makes graphs begins where no caller has been (:func:`begin_numbers`).

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

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

__all__: list[str] = []

AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of the node that adds to ``.grad`` of a leaf."""


def accumulators(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns what holds those of the leaves: keep it while a function is applied to them."""
    leaves = [x for x in tensors if x.is_leaf and x.requires_grad and x.layout == torch.strided]
    if not leaves:
        return []
    with torch.enable_grad():
        return [leaf.view_as(leaf) for leaf in leaves]


node_count: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node gets which the current thread makes."""


def begin_numbers(after: int) -> int:
    """Let the current thread count nodes from ``after`` on; return what the next one gets.

    A thread that is far behind comes nearer with each call, and does not get there at once.
    """
    most = _SLOW if torch.is_anomaly_enabled() else _FAST
    for _ in range(min(after - node_count(), most)):
        _Node()
    return node_count()


_FAST, _SLOW = 1_000_000, 1_000  # nodes, which take 0.1 s; each has a stack in anomaly detection
_Node: Callable[[], object] = torch._C._functions.UndefinedGrad


class Behind(NamedTuple):
    """What is behind the ends of graphs."""

    leaves: list[Tensor]
    others: list[Node]
    """The nodes of others, who may go through them as well."""
    nodes: set[Node]
    """All of them."""


def leaves_behind(
    ends: Iterable[Node],
    known: Iterable[Tensor] = (),
    ours: range | None = None,
    stop: Iterable[Node] = (),
) -> Behind:
    """The leaves that graphs with these ends are made of, but for those that are known.

    Not only parameters of layers: a layer may train a tensor that it keeps for itself. ``ours`` are
    the numbers of the nodes that nobody else goes through; it looks at none of ``stop``.
    """
    own: list[Any] = [*dict.fromkeys(ends)]
    seen: set[Any] = {*own, *stop, None}
    accumulators = [node for node in own if type(node) is AccumulateGrad]
    left = [node for node in own if type(node) is not AccumulateGrad]
    others = list[Node]()
    while left:  # about a microsecond a node, so this does not look at more than it must
        node = left.pop()
        if ours is not None and node._sequence_nr() not in ours:
            others.append(node)
        for child, _ in node.next_functions:
            if child not in seen:
                seen.add(child)
                (accumulators if type(child) is AccumulateGrad else left).append(child)
    found, leaves = {id(leaf) for leaf in known}, list[Tensor]()
    for node in accumulators:
        leaf = node.variable
        if id(leaf) not in found and leaf.requires_grad:
            found.add(id(leaf))
            leaves.append(leaf)
    return Behind(leaves, others, seen)


def origins(ys: Iterable[Tensor], begins: Iterable[Node], made: range) -> list[Tensor] | None:
    """The leaves of a graph that is a function of them and of what came out of ``begins``.

    Args:
        ys: what it made.
        begins: nodes that it begins behind.
        made: the numbers of its nodes.

    Returns:
        ``None`` if it is more: it has nodes of another graph, or written in Python, which may call
        the engine; or leaves whose hooks would see a part of their gradient.
    """
    seen: set[Any] = {*begins, None}
    leaves = {id(y): y for y in ys if y.is_leaf}  # by id: the hash of a tensor is a call in Python
    roots: dict[Any, None] = dict.fromkeys([y.grad_fn for y in ys])
    left = [node for node in roots if node not in seen]
    seen.update(left)
    accumulators: list[Any] = []
    numbers: set[int] = set()
    while left:
        node = left.pop()
        number = node._sequence_nr()
        # Threads count for themselves, so two nodes with one number are not both ours.
        if number not in made or number in numbers or isinstance(node, BackwardCFunction):
            return None
        numbers.add(number)
        for child, _ in node.next_functions:
            if child not in seen:
                seen.add(child)
                (accumulators if type(child) is AccumulateGrad else left).append(child)
    for node in accumulators:
        leaf = node.variable
        leaves[id(leaf)] = leaf
    wanting = []
    for leaf in leaves.values():
        if leaf._backward_hooks:
            return None
        if leaf.requires_grad:
            wanting.append(leaf)
    return wanting
