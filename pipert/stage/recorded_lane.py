"""A lane that says when it does what, for runs that are recorded or profiled.

A run that nobody looks at has plain lanes, so recording costs nothing when it is off. What is
computed is the same: all that is added to the graph are hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pipert._typing import Tensors, Value
from pipert.autograd import streams as stream
from pipert.autograd.checkpoint import Checkpoint
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable
from pipert.layers.call import Computation
from pipert.seeing.backward import (
    interrupt,
    makers,
    node_count,
    watch_backward,
    watch_node,
)
from pipert.seeing.event import BACKWARD, COPY, FORWARD, RECOMPUTE, WAIT
from pipert.seeing.ranges import task_range
from pipert.seeing.recorder import Recorder, Span
from pipert.seeing.stamp import Stamp, stamp
from pipert.stage.lane import Lane
from pipert.stage.step_lane import StepLane
from pipert.status import task_name
from pipert.workers.turn import Turn

__all__: list[str] = []

Place = tuple[torch.device, Stream]

_CPU = torch.device("cpu")


class RecordedLane(Lane):
    """Partition *j* in one run, with its times."""

    # No slots: a step's lane has its own, and this is mixed into it.
    _after_delivery: Callable[[], None] | None = None

    @property
    def _recorder(self) -> Recorder:
        recorder = self._run.account.recorder
        assert recorder is not None
        return recorder

    def _receive_input(self, i: int, turn: Turn) -> Value:
        # A CUDA device waits for its input later, in its stream.
        if isinstance(self._receive, list) or self._device.type == "cuda":
            return super()._receive_input(i, turn)
        with self._recorder.during(WAIT, i, self.j, self._device):
            return super()._receive_input(i, turn)

    def _compute(self, i: int, x: Value) -> tuple[Value, Checkpoint | None]:
        at = i, self.j, self._device
        inputs, first = makers(differentiable(x)[0]), node_count()
        self._computation.after_layer = None
        with self._recorder.during(FORWARD, *at) as span:
            if self._recorder:
                span.layers = moments = [span.start]
                self._computation.after_layer = partial(_note_layer, moments, self._device)
            with task_range(task_name("F", i, self.j), self._device):
                y, checkpoint = super()._compute(i, x)
        self._computation.after_layer = None
        self._watch_backward(i, inputs, range(first, node_count()), y)
        return y, checkpoint

    def _watch_backward(self, i: int, inputs: set[Node], made: range, y: Value) -> None:
        """See ``B[i,j]``, which is no task of ours. But later: nobody shall wait for that."""
        if self._run.context.grad_enabled:
            at, ys = (i, self.j, self._device), differentiable(y)[0]
            self._after_delivery = partial(watch_backward, self._recorder, *at, inputs, made, ys)

    def _deliver(self, y: Value) -> None:
        super()._deliver(y)
        watch, self._after_delivery = self._after_delivery, None
        if watch is not None:
            watch()

    def _recomputation_of(self, i: int) -> Callable[..., None]:
        return partial(_recompute, self._recorder, self._computation, i, self.j, self._device)

    def _move(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        home = tensors[0].device
        size = sum(tensor.nbytes for tensor in tensors)
        clock, on = self._reads((home, source), (self._device, target))
        with self._recorder.during(COPY, i, self.j, self._device, clock, on) as span:
            span.source, span.origin, span.bytes = home, origin, size
            moved = super()._move(i, tensors, source, target, origin)
        to = self.j if origin is None else origin
        clock, on = self._reads((self._device, target), (home, source))
        gradients = Way(i, self.j, to, self._device, home, size, clock, on)
        watch_node(moved, partial(gradients.begin, self._recorder), on)
        return moved

    def _reads(self, source: Place, target: Place) -> Place:
        """The clock and the stream of a copy: of the device that is read, if it is on CUDA."""
        for device, on in (source, target):
            if on is not None and self._recorder.knows(device):
                return device, on
        return _CPU, None

    def _wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        compute = stream.compute_stream(self._device)
        if waiter == compute != awaited:  # for x, now
            with self._recorder.during(WAIT, i, self.j, self._device):
                return super()._wait(i, x, waiter, awaited)
        y = super()._wait(i, x, waiter, awaited)
        if self._run.context.grad_enabled:  # for the gradient of x, in the backward
            # Autograd computes there on the stream that is current here.
            begin = partial(self._recorder.begin, WAIT, i, self.j, self._device)
            watch_node(differentiable(y)[0], begin, None)
        return y


class RecordedStepLane(RecordedLane, StepLane):
    """Partition *j* in one step, with its times."""

    def _watch_backward(self, i: int, inputs: set[Node], made: range, y: Value) -> None:
        """It is a task, and seen as one."""

    def _receive_gradients(self, i: int, turn: Turn) -> Value:
        if self._arrive is None or self._device.type == "cuda":
            return super()._receive_gradients(i, turn)
        with self._recorder.during(WAIT, i, self.j, self._device):
            return super()._receive_gradients(i, turn)

    def _find_gradients(self, i: int, *args: Any) -> Sequence[Tensor | None]:
        name = task_name("B", i, self.j)
        with self._recorder.during(BACKWARD, i, self.j, self._device):
            with task_range(name, self._device):
                return super()._find_gradients(i, *args)


def _note_layer(moments: list[Stamp], device: torch.device) -> None:
    moments.append(stamp(device))


def _recompute(
    recorder: Recorder, computation: Computation, i: int, j: int, device: torch.device, *args: Any
) -> None:
    """``R[i,j]``, on a thread of autograd. References no lane and no run."""
    interrupt(device)
    try:
        with recorder.during(RECOMPUTE, i, j, device):
            with task_range(task_name("R", i, j), device):
                computation.recompute(i, *args)
    finally:
        interrupt(device)


class Way(NamedTuple):
    """The way of gradients from partition ``j`` back to partition ``to``."""

    i: int
    j: int
    to: int
    source: torch.device
    device: torch.device
    bytes: int
    clock: torch.device
    on: Stream

    def begin(self, recorder: Recorder) -> Span:
        """The copy begins."""
        span = recorder.begin(COPY, self.i, self.to, self.device, self.clock, self.on)
        span.source, span.origin, span.bytes = self.source, self.j, self.bytes
        return span
