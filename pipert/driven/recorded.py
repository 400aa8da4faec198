"""What is recorded of a passage, and shown to profilers: ``F[i,j]`` on its driver, ``B`` of a call.

``B[i,j]`` of a call is autograd's own walk through the nodes that were made in ``F[i,j]``, which
are known by their numbers: a driver makes all of a micro-batch, one partition after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.autograd.graph import Node

from pipert._typing import Value
from pipert.autograd.leaves import node_count
from pipert.batch.tensors import differentiable
from pipert.driven.layers import Layers
from pipert.schedules.action import FORWARD, Action
from pipert.seeing.backward import makers, watch_nodes
from pipert.seeing.recorder import Recorder, Span
from pipert.seeing.stamp import Stamp, stamp
from pipert.seeing.told import Told
from pipert.stage.stage import Stage

__all__: list[str] = []


class Seen:
    """One passage, of a run that is recorded."""

    def __init__(self, i: int, told: Told, layers: Layers) -> None:
        self._i = i
        self._layers = layers
        self._called: list[tuple[nn.Module, Stamp]] = []
        self._told = told
        self._starts: list[int] = []
        self._at: list[tuple[int, torch.device]] = []
        self._block: AbstractContextManager[Span] | None = None
        self._span: Span | None = None

    def begin(self, stage: Stage) -> None:
        """A partition begins."""
        place = stage.place
        self._starts.append(node_count())
        self._at.append((place.j, place.device))
        self._block = self._told.recorded(Action(FORWARD, self._i, place.j), place.device)
        self._span = self._block.__enter__()

    def note_layer(self, module: nn.Module) -> None:
        """A layer was called."""
        self._called.append((module, stamp(self._at[-1][1])))

    def end(self) -> None:
        """It ends. Again: no-op."""
        block, span = self._block, self._span
        self._block = self._span = None
        if block is None or span is None:
            return
        called, (j, _) = dict(self._called), self._at[-1]
        self._called.clear()
        ours = [layer.module for layer in self._layers.values() if layer.partition == j]
        if list(called) == ours:
            span.layers = [span.start, *called.values()]
        block.__exit__(None, None, None)

    def watch_backward(self, y: Value) -> None:
        """Record the backward of each partition: from what later ones have used of it."""
        recorder = self._told.recorder
        assert isinstance(recorder, Recorder)
        last = node_count()
        outputs: list[set[Node]] = [set() for _ in self._starts]
        left = [(node, len(self._starts)) for node in makers(differentiable(y)[0])]
        seen: set[Node] = set()
        while left:
            node, user = left.pop()
            number = node._sequence_nr()
            k = bisect_right(self._starts, number) - 1
            if not 0 <= k < len(outputs) or number >= last:
                continue  # the caller's, or a leaf
            if k < user:
                outputs[k].add(node)
            if node not in seen:
                seen.add(node)
                left += [(child, k) for child, _ in node.next_functions if child is not None]
        ends = [*self._starts[1:], last]
        for (j, device), nodes, first, end in zip(
            self._at, outputs, self._starts, ends, strict=True
        ):
            watch_nodes(recorder, self._i, j, device, nodes, set(), range(first, end))
