"""Seeing ``B[i,j]``: where the backward of a partition begins and ends in autograd's graph.

``B[i,j]`` is no function of ours but the nodes between the partition's outputs and its inputs. They
get hooks, which change nothing in the graph, and so nothing in what is computed:

* It begins before a node that made an output of the partition.
* It ends after the last of its nodes behind which nothing of the partition is left: those that lead
  to inputs, to parameters or nowhere. Which of them comes last is not known before, so each says
  that the task has ended, and what counts is the last time.

Nodes that several tasks lead to, as when a layer uses what another micro-batch has computed, belong
to the first of them: that is the last one to go backward.

One thread of autograd does the backward of all CPU partitions, and may do the nodes of two tasks in
turns: their events overlap then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pipert.recording.event import BACKWARD, task_name
from pipert.recording.ranges import mark
from pipert.recording.recorder import Recorder, Span
from pipert.recording.stamp import stamp

__all__: list[str] = []


class _Task:
    """``B[i,j]`` of one run. References no node and no tensor."""

    __slots__ = ("_at", "_graph_task", "_recorder", "_span")

    def __init__(self, recorder: Recorder, i: int, j: int, device: torch.device) -> None:
        self._recorder = recorder
        self._at = i, j, device
        self._graph_task = -1  # the backward that it was last part of
        self._span: Span | None = None

    def begin(self, *_: Any) -> None:
        graph_task = torch._C._current_graph_task_id()
        if self._graph_task != graph_task:
            self._graph_task = graph_task
            i, j, device = self._at
            mark(task_name("B", i, j), device)
            self._span = self._recorder.begin(BACKWARD, i, j, device) if self._recorder else None

    def end(self, *_: Any) -> None:
        if self._span is not None and self._graph_task == torch._C._current_graph_task_id():
            self._span.end = stamp(self._span.clock)


def watch_backward(
    recorder: Recorder, i: int, j: int, device: torch.device, xs: Iterable[Tensor],
    ys: Iterable[Tensor],
) -> None:  # fmt: skip
    """Record the backward from ``ys`` to ``xs``, the outputs and inputs of a partition."""
    inputs = _makers(xs)
    outputs = _makers(ys) - inputs
    if not outputs:
        return
    task = _Task(recorder, i, j, device)
    for node in outputs:
        node.register_prehook(task.begin)
    if recorder:
        for node in _ends(outputs, inputs, recorder, task):
            node.register_hook(task.end)


def watch_node(
    ys: Iterable[Tensor], begin: Callable[[], Span], on: torch.cuda.Stream | None
) -> None:
    """Record the one node that has made ``ys``, if any, as the span that ``begin`` returns."""
    for node in _makers(ys):
        spans: list[Span] = []
        node.register_prehook(partial(_open, spans, begin))
        node.register_hook(partial(_close, spans, on))


def _open(spans: list[Span], begin: Callable[[], Span], _: Any) -> None:
    spans.append(begin())


def _close(spans: list[Span], on: torch.cuda.Stream | None, *_: Any) -> None:
    span = spans.pop()
    span.end = stamp(span.clock, on)


def _makers(tensors: Iterable[Tensor]) -> set[Node]:
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def _ends(
    outputs: Iterable[Node], inputs: set[Node], recorder: Recorder, task: _Task
) -> list[Node]:
    """The nodes reached from ``outputs`` behind some edge of which nothing of the task is left."""
    ends, seen, left = [], set(outputs), list(outputs)
    while left:
        node = left.pop()
        is_end = False
        for child, _ in node.next_functions:
            if child is None or child in inputs or not _claim(child, recorder, task):
                is_end = True
            elif child not in seen:
                seen.add(child)
                left.append(child)
        if is_end:
            ends.append(node)
    return ends


def _claim(node: Node, recorder: Recorder, task: _Task) -> bool:
    """Whether a node belongs to ``task``: not a leaf, and no other task of the run has it."""
    if not node.next_functions:
        return False
    claims: dict[Any, Any] = node.metadata  # type: ignore[assignment]
    return claims.setdefault(recorder, task) is task
