"""Seeing ``B[i,j]``: where the backward of a partition begins and ends in autograd's graph.

``B[i,j]`` is no function of ours but the nodes between the partition's outputs and its inputs. They
get hooks, which change nothing in the graph, and so nothing in what is computed:

1. It begins before a node that made an output of the partition.
2. It ends after the last of its nodes behind which nothing of the partition is left: those that
   lead to inputs, to parameters or out of the partition. Which of them comes last is not known
   before, so each says that the task has ended, and what counts is the last time.
3. Its nodes are those that the worker made in ``F[i,j]``, by autograd's count of nodes in that
   thread. What else a layer uses, such as what the caller or another micro-batch has computed, is
   not part of it; nor are the nodes of a pipe inside of a layer.
4. One thread of autograd does the backward of all CPU partitions, and may do the nodes of two tasks
   in turns. Then a task is several pieces, each a span of its own: from one hook to the next, the
   thread was at the task that the second one belongs to.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pipert.schedules.action import Action
from pipert.seeing.event import BACKWARD
from pipert.seeing.ranges import mark
from pipert.seeing.recorder import Recorder, Span
from pipert.seeing.stamp import Stamp, stamp

__all__: list[str] = []


class _Thread(threading.local):
    """What a thread of autograd is at, as far as its last hook has told."""

    task: weakref.ref[_Task] | None = None
    moment: Stamp = 0.0

    def is_at(self, task: _Task | None, moment: Stamp) -> None:
        """It goes on with ``task``; what it was at ends here, if it has not ended before."""
        before = self.task() if self.task is not None else None
        if before is not None and before is not task:
            before.interrupt(moment)
        self.task = None if task is None else weakref.ref(task)
        self.moment = moment


_thread = _Thread()


def interrupt(device: torch.device) -> None:
    """The current thread does something else from here, or has done so until here."""
    _thread.is_at(None, stamp(device))


class _Task:
    """``B[i,j]`` of one run. References no node and no tensor."""

    __slots__ = ("__weakref__", "_at", "_graph_task", "_recorder", "_span")

    def __init__(self, recorder: Recorder, i: int, j: int, device: torch.device) -> None:
        self._recorder = recorder
        self._at = i, j, device
        self._graph_task = -1  # the backward that it was last part of
        self._span: Span | None = None

    def begin(self, *_: Any) -> None:
        graph_task = torch._C._current_graph_task_id()
        if self._graph_task == graph_task:
            return  # by another output
        self._graph_task = graph_task
        i, j, device = self._at
        mark(str(Action("B", i, j)), device)
        if self._recorder:
            self._span = self._recorder.begin(BACKWARD, i, j, device)
            _thread.is_at(self, self._span.start)

    def end(self, *_: Any) -> None:
        if self._span is None or self._graph_task != torch._C._current_graph_task_id():
            return  # the node runs without the task, as in a backward from its middle
        now = stamp(self._span.clock)
        at = _thread.task
        if at is None or at() is not self:
            i, j, device = self._at
            self._span = self._recorder.begin(BACKWARD, i, j, device)
            self._span.start = _thread.moment
        _thread.is_at(self, now)
        self._span.end = now

    def interrupt(self, moment: Stamp) -> None:
        if self._span is not None and self._span.end is None:
            self._span.end = moment


def watch_backward(
    recorder: Recorder, i: int, j: int, device: torch.device, inputs: set[Node], made: range,
    ys: Iterable[Tensor],
) -> None:  # fmt: skip
    """Record the backward of a partition.

    Args:
        inputs: the nodes that made its inputs.
        made: the numbers of the nodes that it has made.
        ys: its outputs.
    """
    watch_nodes(recorder, i, j, device, makers(ys) - inputs, inputs, made)


def watch_nodes(
    recorder: Recorder, i: int, j: int, device: torch.device, outputs: set[Node],
    inputs: set[Node], made: range,
) -> None:  # fmt: skip
    """The same, by the nodes that made its outputs."""
    if not outputs:
        return
    task = _Task(recorder, i, j, device)
    for node in outputs:
        node.register_prehook(task.begin)
    if recorder:
        for node in _ends(outputs, inputs, made):
            node.register_hook(task.end)


def watch_node(
    ys: Iterable[Tensor], begin: Callable[[], Span], on: torch.cuda.Stream | None
) -> None:
    """Record the one node that has made ``ys``, if any, as the span that ``begin`` returns."""
    spans: list[Span] = []

    def end(*_: Any) -> None:
        span = spans.pop()
        span.end = stamp(span.clock, on)

    for node in makers(ys):
        node.register_prehook(lambda _: spans.append(begin()))
        node.register_hook(end)


def makers(tensors: Iterable[Tensor]) -> set[Node]:
    """The nodes that have made ``tensors``."""
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def _ends(outputs: Iterable[Node], inputs: set[Node], made: range) -> list[Node]:
    """The nodes reached from ``outputs`` behind some edge of which nothing of the task is left."""
    ends, seen, left = [], set(outputs), list(outputs)
    while left:
        node = left.pop()
        is_end = False
        for child, _ in node.next_functions:
            if child is None or child in inputs or child._sequence_nr() not in made:
                is_end = True  # also before a leaf, whose number is the largest there is
            elif child not in seen:
                seen.add(child)
                left.append(child)
        if is_end:
            ends.append(node)
    return ends
