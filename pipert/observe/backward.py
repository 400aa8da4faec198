"""Watches ``B[i,j]`` of a call: where a partition's backward begins and ends in autograd's graph.

There ``B[i,j]`` is not a function but the nodes between the partition's outputs and its inputs.
They get hooks, which change nothing in the graph, and so nothing in what is computed:

1. The task begins before a node that made an output of the partition.
2. It ends after the last of its nodes that lead out of the task: to inputs, to parameters or to
   anything else. Which of them comes last is not known in advance, so each notes the end of the
   task, and the last note counts.
3. Its nodes are those that the worker made in ``F[i,j]``, by autograd's count of nodes in that
   thread. What else a layer uses, such as results of the caller or of another micro-batch, does not
   belong to it; nor do the nodes of a pipe inside a layer.
4. One thread of autograd does the backward of all CPU partitions, and may switch between the nodes
   of two tasks. Then a task consists of several spans: from one hook to the next, the thread was at
   the task that the second hook belongs to.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pipert._torch import backward_id, sequence_nr
from pipert.autograd.leaves import is_cast_of_leaf
from pipert.observe.event import BACKWARD
from pipert.observe.ranges import mark
from pipert.observe.recorder import Recorder, Span, Stamp, stamp
from pipert.schedules.action import Action


class _AutogradThread(threading.local):
    """The task that a thread of autograd was executing at its last hook."""

    task: weakref.ref[_Task] | None = None
    moment: Stamp = 0.0

    def switch_to(self, task: _Task | None, moment: Stamp) -> None:
        """Continue with ``task``; the task before it ends here, unless it has ended already."""
        previous = self.task() if self.task is not None else None
        if previous is not None and previous is not task:
            previous.interrupt(moment)
        self.task = None if task is None else weakref.ref(task)
        self.moment = moment


_thread = _AutogradThread()


def interrupt(device: torch.device) -> None:
    """Note that the current thread does something else from here, or has done so until here."""
    _thread.switch_to(None, stamp(device))


class _Task:
    """``B[i,j]`` of one run. References no node and no tensor."""

    __slots__ = ("__weakref__", "_graph_task", "_place", "_recorder", "_span")

    def __init__(self, recorder: Recorder, i: int, j: int, device: torch.device) -> None:
        self._recorder = recorder
        self._place = i, j, device
        self._graph_task = -1  # the backward that it was last part of
        self._span: Span | None = None

    def begin(self, *_: Any) -> None:
        graph_task = backward_id()
        if self._graph_task == graph_task or not self._is_here():
            return  # another output has begun it
        self._graph_task = graph_task
        i, j, device = self._place
        mark(str(Action("B", i, j)), device)
        if self._recorder:
            self._span = self._recorder.begin(BACKWARD, i, j, device)
            _thread.switch_to(self, self._span.start)

    def end(self, *_: Any) -> None:
        if self._span is None or self._graph_task != backward_id() or not self._is_here():
            return  # the node runs without the task, as in a backward from its middle
        now = stamp(self._span.clock)
        current = _thread.task
        if current is None or current() is not self:
            i, j, device = self._place
            self._span = self._recorder.begin(BACKWARD, i, j, device)
            self._span.start = _thread.moment
        _thread.switch_to(self, now)
        self._span.end = now

    def _is_here(self) -> bool:
        """Whether the node is on the task's device: copies that micro-batches share may not be."""
        device = self._place[2]
        return device.type != "cuda" or device.index == torch.cuda.current_device()

    def interrupt(self, moment: Stamp) -> None:
        if self._span is not None and self._span.end is None:
            self._span.end = moment


def watch_nodes(
    recorder: Recorder, i: int, j: int, device: torch.device, outputs: set[Node],
    inputs: set[Node], made: range,
) -> None:  # fmt: skip
    """Record the backward of a partition.

    Args:
        outputs: the nodes that made its outputs, without those that made its inputs.
        inputs: the nodes that made its inputs.
        made: the numbers of its own nodes.
    """
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
    """Record the one node that made ``ys``, if any, as the span that ``begin`` returns."""
    spans: list[Span] = []

    def end(*_: Any) -> None:
        span = spans.pop()
        span.end = stamp(span.clock, on)

    for node in makers(ys):
        node.register_prehook(lambda _: spans.append(begin()))
        node.register_hook(end)


def makers(tensors: Iterable[Tensor]) -> set[Node]:
    """Return the nodes that made ``tensors``."""
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def _ends(outputs: Iterable[Node], inputs: set[Node], made: range) -> list[Node]:
    """Return the nodes of the task, from ``outputs`` on, that have an edge out of the task."""
    ends, seen, left = [], set(outputs), list(outputs)
    while left:
        node = left.pop()
        is_end = False
        for child, _ in node.next_functions:
            if child is None or child in inputs or sequence_nr(child) not in made:
                is_end = True  # also before a leaf, whose number is the largest there is
            elif is_cast_of_leaf(child):
                is_end = True  # maybe another thread's, whose numbers say nothing
            elif type(child).__name__ == "_SendBackward":
                is_end = True  # a tied weight's, on its device and so on another thread
            elif child not in seen:
                seen.add(child)
                left.append(child)
        if is_end:
            ends.append(node)
    return ends
