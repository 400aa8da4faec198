"""Finds the leaves of a graph, and applies functions to leaves without a deadlock.

A task's graph continues into a graph of the caller's where the task uses a tensor that the caller
computed, such as a learned temperature. Sequence numbers tell the nodes apart, but each thread
counts its own. So (**V2**):

1. A thread that builds graphs starts beyond any number that a caller has used
   (:func:`.begin_numbers`).
2. Autocast casts a weight once and caches it for all threads, so a graph may hold the cast of
   another micro-batch's thread, with any number. Such a node saves nothing and leads to a leaf
   alone (:func:`is_cast_of_leaf`): any number of backward passes may go through it at once, and it
   belongs to whichever graph reaches it.
3. Other nodes of a third thread are there only if the model keeps a tensor with its graph from
   another micro-batch. Then a number affects only which ``B[i,j]`` goes through such a node, not
   the gradients; where their memory is freed before another needs it, torch raises.

torch (2.13) looks up or creates the ``AccumulateGrad`` of a leaf while it holds the leaf's lock,
and may take the interpreter's lock meanwhile: to create the node, or if only Python references it.
A ``Function`` in Python is applied in the opposite order: it holds the interpreter's lock and waits
for the leaf's. Two threads that do both deadlock, even without a pipe. So before one of pipert's
functions is applied to a leaf, a view of the leaf creates the ``AccumulateGrad``, waiting without
the interpreter's lock, and references it from C++ until the function has been applied: other
threads then only look it up. No Python object is made for the node, since that alone would make a
lookup need the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, filterfalse
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from pipert._torch import (
    AccumulateGrad,
    WithoutFunctions,
    outputs_of,
    sequence_nr,
    sequence_nrs,
    tensor_hooks,
)


def accumulators(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns views that hold the leaves' nodes, to be kept while a function is applied to them."""
    leaves = [x for x in tensors if x.is_leaf and x.requires_grad and x.layout == torch.strided]
    if not leaves:
        return []
    with torch.enable_grad(), WithoutFunctions():  # a leaf's class might put a node in between
        return [leaf.view_as(leaf) for leaf in leaves]


def is_cast_of_leaf(node: Any) -> bool:
    """Whether ``node`` does nothing but cast a leaf, as autocast does (rule 2)."""
    if type(node).__name__ != "ToCopyBackward0":
        return False
    ((child, _),) = node.next_functions
    return type(child) is AccumulateGrad


class Reachable(NamedTuple):
    """What a backward from the ends of graphs would reach."""

    leaves: list[Tensor]
    others: list[Node]
    """The nodes of other graphs, which other backward passes may go through as well; no casts."""
    nodes: list[Node]
    """All nodes that were found, except those of leaves."""
    again: list[Node]
    """Those to which further edges lead, and those of leaves, once for each such edge."""


def find_leaves(
    ends: Iterable[Node],
    known: Iterable[Tensor] = (),
    ours: range | None = None,
    stop: Iterable[Node] = (),
) -> Reachable:
    """Returns the leaves of the graphs with these ``ends``, except the ``known`` ones.

    They are not only parameters of layers: a layer may train a tensor that it keeps to itself.

    Args:
        ends: the nodes to start from.
        known: leaves to leave out.
        ours: the numbers of the nodes that no other backward goes through; by default all.
        stop: nodes that are not visited.
    """
    roots: list[Any] = [*dict.fromkeys(ends)]
    seen: set[Any] = {*roots, *stop, None}
    again = list[Node]()
    accumulating = AccumulateGrad  # a local name, as the loop takes half a microsecond a node
    accumulators, found = list[Any](), list[Any]()
    for node in roots:
        (accumulators if type(node) is accumulating else found).append(node)
    for node in found:  # which grows
        for child, _ in node.next_functions:
            if child not in seen:
                seen.add(child)
                (accumulators if type(child) is accumulating else found).append(child)
            elif child is not None:
                again.append(child)
    others = list[Node]()
    if ours is not None and found:
        numbers = sequence_nrs(found)
        if min(numbers) < ours.start or max(numbers) >= ours.stop:
            strange = [node for node in found if sequence_nr(node) not in ours]
            others = [node for node in strange if not is_cast_of_leaf(node)]
    variables = list(map(_variable, accumulators))
    leaves = dict(zip(map(id, variables), variables, strict=True))
    for leaf in known:
        leaves.pop(id(leaf), None)
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return Reachable(trained, others, found, again)


_node: Callable[[Any], Any] = itemgetter(0)  # of an edge
_variable: Callable[[Any], Tensor] = attrgetter("variable")
_next_functions: Callable[[Any], Iterable[Any]] = attrgetter("next_functions")


def origins(
    ys: Sequence[Tensor],
    begins: Collection[tuple[Any, int]],
    copies: Iterable[Tensor],
    made: range,
) -> tuple[list[Tensor], bool] | None:
    """Returns what a task's graph begins with, if the task is a function of that and its inputs.

    Args:
        ys: the outputs, which require grad.
        begins: the node and the number of its output at which the graph begins, for each input.
        copies: the copies that the task computes with, of weights that live on other devices.
        made: the numbers of the nodes that the task created.

    Returns:
        The leaves that require grad and the copies that were used, and whether functions written in
        Python use them, which may call the engine. ``None`` if the graph has nodes of another
        graph, or what the functions do in the engine is seen: by hooks on the leaves, or by a
        reentrant checkpoint of torch, which refuses to be in a part of a backward.
    """
    of_copies = dict[Any, Tensor]()
    for copy in copies:
        if not copy.is_leaf:
            of_copies[copy.grad_fn, copy.output_nr] = copy
    begins = {*begins, *of_copies}
    stops = set(map(_node, begins))
    ends = [(y.grad_fn, y.output_nr) for y in ys if y.grad_fn is not None]
    reachable = find_leaves(filterfalse(stops.__contains__, map(_node, ends)), (), made, stops)
    # Another thread's node may have a number of the task's. The pair is right as well: it
    # differentiates all that it computes again.
    if reachable.others:
        return None
    leaves = reachable.leaves
    if of_copies or {*map(len, map(outputs_of, stops))} - {1}:  # another output may be used as well
        edges = {*ends, *chain.from_iterable(map(_next_functions, reachable.nodes))}
        if any(edge[0] in stops and edge not in begins for edge in edges):
            return None
        leaves += [copy for edge, copy in of_copies.items() if edge in edges]
    if len(ends) < len(ys):
        leaves = list({id(x): x for x in (*(y for y in ys if y.is_leaf), *leaves)}.values())
    kinds = set(map(type, reachable.nodes))
    has_functions = is_in_python(kinds)
    if has_functions:
        is_reentrant = any(kind.__name__ == _REENTRANT for kind in kinds)
        if is_reentrant or any(map(tensor_hooks, leaves)):
            return None
    return leaves, has_functions


_REENTRANT = "CheckpointFunctionBackward"


def is_in_python(classes: Iterable[type], but: Sequence[str] = ()) -> bool:
    """Whether one of these classes of nodes is that of a ``Function`` written in Python.

    Those whose name is in ``but`` do not count.
    """
    for kind in set(classes):
        if issubclass(kind, BackwardCFunction) and kind.__name__ not in but:
            return True
    return False
