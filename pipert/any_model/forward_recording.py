"""Records a micro-batch, and shows it to profilers: each ``F[i,j]``, and in a call each ``B[i,j]``.

In a call ``B[i,j]`` is autograd's own walk through the nodes that were made in ``F[i,j]``. They are
identified by their numbers: one thread makes all nodes of a micro-batch, partition by partition,
but for the casts of weights, which are left out (``autograd.leaves``, rule 2).
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack

import torch
from torch.autograd.graph import Node

from pipert._torch import node_count, sequence_nr
from pipert._typing import Value
from pipert.autograd.leaves import is_cast_of_leaf
from pipert.batch.tensors import differentiable
from pipert.observe.backward import makers, watch_nodes
from pipert.observe.notifier import Notifier
from pipert.observe.recorder import Recorder
from pipert.schedules.action import FORWARD, Action
from pipert.stage.stage import Stage


class ForwardRecording:
    """The recording of one micro-batch, in a run that is recorded."""

    def __init__(self, i: int, notifier: Notifier) -> None:
        self._i = i
        self._notifier = notifier
        self._starts: list[int] = []
        self._places: list[tuple[int, torch.device]] = []  # the partitions begun, in order
        self._block = ExitStack()

    def begin(self, stage: Stage) -> None:
        """Begin ``F[i,j]``."""
        place = stage.place
        self._starts.append(node_count())
        self._places.append((place.j, place.device))
        action = Action(FORWARD, self._i, place.j)
        self._block.enter_context(self._notifier.recorded(action, place.device))

    def end(self) -> None:
        """End ``F[i,j]``. A second call does nothing."""
        self._block.close()

    def watch_backward(self, y: Value) -> None:
        """Record the backward of each partition, from the nodes whose outputs later ones use."""
        recorder = self._notifier.recorder
        assert isinstance(recorder, Recorder)
        last = node_count()
        outputs: list[set[Node]] = [set() for _ in self._starts]
        left = [(node, len(self._starts)) for node in makers(differentiable(y)[0])]
        seen: set[Node] = set()
        while left:
            node, user = left.pop()
            number = sequence_nr(node)
            k = bisect_right(self._starts, number) - 1
            if not 0 <= k < len(outputs) or number >= last or is_cast_of_leaf(node):
                continue  # the caller's node, a leaf's, or maybe another micro-batch's
            if k < user:
                outputs[k].add(node)
            if node not in seen:
                seen.add(node)
                left += [(child, k) for child, _ in node.next_functions if child is not None]
        ends = [*self._starts[1:], last]
        for (j, device), nodes, first, end in zip(
            self._places, outputs, self._starts, ends, strict=True
        ):
            watch_nodes(recorder, self._i, j, device, nodes, set(), range(first, end))
