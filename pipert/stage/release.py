"""Decides when ``B[i,j]`` of a step releases the tensors that its graph has saved.

The engine releases what a node has saved right after it has run the node. Python has seen most of
these tensors, as inputs of layers, and to release such a tensor the engine needs the interpreter's
lock. Meanwhile other workers call layers, or go back as well. So ``B`` would wait for the lock, and
make others wait, after every few operations: up to a tenth of the time and of the CPU time of a
step of small operations (``benchmarks/small_operations.py``).

Here the graph is retained, and the worker drops it when ``B`` is over. For that it needs the lock
once. The price is memory: what the graph has saved is alive beside all of the gradients of its
weights. So a graph is retained only if

1. workers compete for the lock: there are several, several micro-batches, a lock, and graphs of
   some size, since those of few nodes are over before others need it;
2. it has saved little: the outputs of its operations, which it may have saved, have at most
   ``_MOST`` bytes, counted once in a run for graphs of as many nodes. On CPU, where operations on
   more take long, and memory that is reused late is in no cache, also ``_MOST_EACH`` on average;
3. nobody else holds a part of it, as far as the last micro-batch of the partition showed. A layer
   may keep its output, or a loss function its losses, which would keep all that is retained;
4. its nodes are torch's own. A custom function may reuse the memory of saved tensors, as that of a
   compiled layer does, and refuse to be retained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.autograd.graph import Node

from pipert._torch import AccumulateGrad
from pipert.autograd.leaves import Behind, is_in_python
from pipert.autograd.order import ENTERED
from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME
from pipert.schedules.plan import Plan

__all__: list[str] = []

_MOST = 64 * 2**20  # bytes
_MOST_EACH = 16 * 2**10  # bytes of an operation on CPU
_FEW = 32  # nodes; to find out about fewer costs more than it saves


class Holders:
    """Tells whether others held the last graphs of a partition. Used by its worker only."""

    __slots__ = ("are_there", "watched")

    def __init__(self) -> None:
        self.are_there = True  # until graphs were seen to end
        self.watched: list[weakref.ref[_Canary]] = []
        """The canaries of the graphs that are watched."""

    def watch(self, first: Node) -> None:
        """Watch the graph that begins with the node ``first``, which lives as long as any part."""
        canary = _Canary()
        metadata: Any = first.metadata
        metadata["pipert"] = canary
        self.watched.append(weakref.ref(canary))

    def look(self) -> None:
        """Find out whether anybody holds the watched graphs, which this worker has dropped."""
        self.are_there = any([canary() is not None for canary in self.watched])
        self.watched.clear()

    def __repr__(self) -> str:
        return f"<Holders, {'some' if self.are_there else 'none'}>"


class _Canary:
    """Ends with the graph at one of whose nodes it is."""

    __slots__ = ("__weakref__",)


class Release:
    """Decides for one partition in one run. Used by its worker only."""

    __slots__ = ("_are_little", "_compete", "_holders", "_most_each")

    def __init__(self, plan: Plan, device: torch.device, holders: Holders) -> None:
        self._holders = holders
        self._most_each = _MOST_EACH if device.type == "cpu" else _MOST
        self._compete = ONE_THREAD_AT_A_TIME and plan.m > 1 and len(set(plan.placement)) > 1
        self._are_little: dict[int, bool] = {}  # by the number of nodes

    def is_at_end(self, behind: Behind) -> bool:
        """Return whether to retain the graph; called before each backward."""
        if not self._compete or behind.first is None or len(behind.nodes) < _FEW:
            return False
        self._holders.watch(behind.first)
        if self._holders.are_there or not are_from_torch(behind.nodes):
            return False
        number = len(behind.nodes)
        if number not in self._are_little:
            most = min(_MOST, self._most_each * number)
            self._are_little[number] = bytes_of_outputs(behind.nodes) <= most
        return self._are_little[number]

    def end(self) -> None:
        """Note who holds the graphs; called when ``B`` has dropped them."""
        if self._holders.watched:
            self._holders.look()

    def __repr__(self) -> str:
        return f"<Release, {self._holders!r}>"


def are_from_torch(nodes: Iterable[Any]) -> bool:
    """Return whether no node but those that graphs of a step begin with is written in Python."""
    return not is_in_python({*map(type, nodes)} - {ENTERED})


def bytes_of_outputs(nodes: Iterable[Any]) -> float:
    """Return how many bytes the outputs of nodes have; infinitely many if one is nested."""
    size = 0
    for node in nodes:
        if node is None or type(node) is AccumulateGrad:
            continue
        for output in node._input_metadata:  # of the gradient, which is as large
            if output.is_nested_tensor or output.is_cpp_nested_tensor:
                return float("inf")
            size += prod(output.shape) * output.dtype.itemsize
    return size
