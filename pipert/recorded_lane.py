"""A lane that says when it does what, for runs that are recorded or profiled.

A run that nobody looks at has plain lanes, so recording costs nothing when it is off. What is
computed is the same: all that is added to the graph are hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipert import stream
from pipert._typing import Tensors, Value
from pipert.autograd.checkpoint import Checkpoint
from pipert.autograd.transfer import Stream
from pipert.computation import Computation
from pipert.lane import Lane
from pipert.recording.backward import watch_backward, watch_node
from pipert.recording.event import COPY, FORWARD, RECOMPUTE, WAIT, task_name
from pipert.recording.ranges import task_range
from pipert.recording.recorder import Recorder, Span
from pipert.recording.stamp import Stamp, stamp
from pipert.value import differentiable
from pipert.workers.turn import Turn

__all__: list[str] = []


class RecordedLane(Lane):
    """Partition *j* in one run, with its times."""

    __slots__ = ("_recorder",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        recorder = self._run.account.recorder
        assert recorder is not None
        self._recorder = recorder

    def _receive_input(self, i: int, turn: Turn) -> Value:
        # A CUDA device waits for its input later, in its stream.
        if isinstance(self._receive, list) or self._device.type == "cuda":
            return super()._receive_input(i, turn)
        with self._recorder.during(WAIT, i, self.j, self._device):
            return super()._receive_input(i, turn)

    def _compute(self, i: int, x: Value) -> tuple[Value, Checkpoint | None]:
        at = i, self.j, self._device
        span = self._recorder.begin(FORWARD, *at)
        moments: list[Stamp] = [span.start]
        self._computation.after_layer = partial(_note_layer, moments, self._device)
        try:
            with task_range(task_name("F", i, self.j), self._device):
                y, checkpoint = super()._compute(i, x)
        finally:
            self._computation.after_layer = None
            span.layers = moments
            span.end = stamp(self._device)
        if self._run.context.grad_enabled:
            watch_backward(self._recorder, *at, differentiable(x)[0], differentiable(y)[0])
        return y, checkpoint

    def _recomputation_of(self, i: int) -> Callable[..., None]:
        return partial(_recompute, self._recorder, self._computation, i, self.j, self._device)

    def _move(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        home = tensors[0].device
        clock, on = home, source  # between GPUs it is the reading one that copies
        if source is None or not self._recorder.knows(home):
            clock, on = self._device, target
        size = sum(tensor.nbytes for tensor in tensors)
        with self._recorder.during(COPY, i, self.j, self._device, clock, on) as span:
            span.source, span.origin, span.bytes = home, origin, size
            moved = super()._move(i, tensors, source, target, origin)
        back = self.j if origin is None else origin
        begin = partial(_begin_copy_back, self._recorder, i, self.j, back, self._device, home, size)
        if target is None:
            watch_node(moved, partial(begin, home, source), source)
        else:
            watch_node(moved, partial(begin, self._device, target), target)
        return moved

    def _wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        compute = stream.compute_stream(self._device)
        if waiter == compute:  # for x, now
            with self._recorder.during(WAIT, i, self.j, self._device, on=compute):
                return super()._wait(i, x, waiter, awaited)
        y = super()._wait(i, x, waiter, awaited)
        if self._run.context.grad_enabled:  # for the gradient of x, in the backward
            begin = partial(self._recorder.begin, WAIT, i, self.j, self._device, on=compute)
            watch_node(differentiable(y)[0], begin, compute)
        return y

    def __repr__(self) -> str:
        return f"<RecordedLane {self.j} on {self._device} of {self.progress!r}>"


def _note_layer(moments: list[Stamp], device: torch.device) -> None:
    moments.append(stamp(device))


def _recompute(
    recorder: Recorder, computation: Computation, i: int, j: int, device: torch.device, *args: Any
) -> None:
    """``R[i,j]``, on a thread of autograd. References no lane and no run."""
    name = task_name("R", i, j)
    with recorder.during(RECOMPUTE, i, j, device), task_range(name, device):
        computation.recompute(i, *args)


def _begin_copy_back(
    recorder: Recorder, i: int, j: int, to: int, source: torch.device, device: torch.device,
    size: int, clock: torch.device, on: Stream,
) -> Span:  # fmt: skip
    """The gradient of what was copied goes back the way it came."""
    span = recorder.begin(COPY, i, to, device, clock, on)
    span.source, span.origin, span.bytes = source, j, size
    return span
