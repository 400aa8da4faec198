"""What a stage has around its parts when its run is recorded or profiled.

What is computed is the same: all that is added to the graph are hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from pipert._typing import Tensors, Value
from pipert.autograd import streams
from pipert.autograd.checkpoint import Checkpoint
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable
from pipert.layers.place import Place
from pipert.schedules.action import FORWARD, Action
from pipert.seeing.backward import makers, node_count, watch_backward, watch_node
from pipert.seeing.event import COPY, WAIT
from pipert.seeing.recorder import Recorder, Span
from pipert.seeing.stamp import Stamp, stamp
from pipert.stage.ends import Ends
from pipert.stage.forward import compute_layers
from pipert.stage.links import Link
from pipert.stage.stage import Stage
from pipert.stage.transport import Transport

__all__: list[str] = []

_CPU = torch.device("cpu")


class RecordedLink:
    """A link whose receiver's waiting is recorded.

    Args:
        link: the link.
        recorder: the run's.
        place: the receiver's, on CPU: a CUDA device waits for its input later, in its stream.
    """

    __slots__ = ("_link", "_place", "_recorder", "close", "send")

    def __init__(self, link: Link, recorder: Recorder, place: Place) -> None:
        self._link = link
        self._recorder = recorder
        self._place = place
        self.send = link.send
        self.close = link.close

    def receive(self, i: int, before_waiting: Callable[[], None]) -> Value:
        with self._recorder.during(WAIT, i, self._place.j, self._place.device):
            return self._link.receive(i, before_waiting)


def recorded_compute(stage: Stage, i: int, x: Value) -> tuple[Value, Checkpoint | None]:
    """Record ``compute_layers``, and when each layer was done."""
    device = stage.place.device
    with stage.run.told.recorded(Action(FORWARD, i, stage.place.j), device) as span:
        assert span is not None
        after_layer = None
        if stage.run.told.recorder:
            span.layers = moments = [span.start]
            after_layer = partial(_note_layer, moments, device)
        return compute_layers(stage, i, x, after_layer)


def _note_layer(moments: list[Stamp], device: torch.device) -> None:
    moments.append(stamp(device))


class RecordedTransport:
    """A transport whose copies and waits are recorded, those of the backward as well."""

    __slots__ = ("_place", "_recorder", "_transport", "in_graph")

    def __init__(self, transport: Transport, recorder: Recorder, place: Place) -> None:
        self._transport = transport
        self._recorder = recorder
        self._place = place
        self.in_graph = transport.in_graph

    def copy(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        home, device, j = tensors[0].device, self._place.device, self._place.j
        size = sum(tensor.nbytes for tensor in tensors)
        clock, on = self._reads((home, source), (device, target))
        with self._recorder.during(COPY, i, j, device, clock, on) as span:
            span.source, span.origin, span.bytes = home, origin, size
            moved = self._transport.copy(i, tensors, source, target, origin)
        to = j if origin is None else origin
        clock, on = self._reads((device, target), (home, source))
        gradients = _Way(i, j, to, device, home, size, clock, on)
        watch_node(moved, partial(gradients.begin, self._recorder), on)
        return moved

    def wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        compute = streams.compute_stream(self._place.device)
        if compute not in (waiter, awaited):  # the copy of an argument, which waits for its caller
            return self._transport.wait(i, x, waiter, awaited)
        begin = partial(self._recorder.begin, WAIT, i, self._place.j, self._place.device)
        if waiter == compute != awaited:  # for x, now
            with self._recorder.during(WAIT, i, self._place.j, self._place.device):
                return self._transport.wait(i, x, waiter, awaited)
        y = self._transport.wait(i, x, waiter, awaited)
        xs = [tensor for tensor in differentiable(y)[0] if self.in_graph(tensor)]
        # For the gradient of x. Autograd computes there on the stream that is current here.
        watch_node(xs, begin, None)
        return y

    def _reads(
        self, source: tuple[torch.device, Stream], target: tuple[torch.device, Stream]
    ) -> tuple[torch.device, Stream]:
        """The clock and the stream of a copy: of the device that is read, if it is on CUDA."""
        for device, on in (source, target):
            if on is not None and self._recorder.knows(device):
                return device, on
        return _CPU, None


class _Way(NamedTuple):
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
        """Begin the span of the copy."""
        span = recorder.begin(COPY, self.i, self.to, self.device, self.clock, self.on)
        span.source, span.origin, span.bytes = self.source, self.j, self.bytes
        return span


class RecordedEnds:
    """Ends in the graph between which ``B[i,j]`` is seen, which is no task of ours.

    The nodes are looked at when the output was sent: nobody shall wait for that.
    """

    __slots__ = ("_ends", "_first", "_inputs", "_later", "_place", "_recorder", "borrow")

    def __init__(self, ends: Ends, recorder: Recorder, place: Place) -> None:
        self._ends = ends
        self._recorder = recorder
        self._place = place
        self.borrow = ends.borrow
        self._inputs: set[Node] = set()
        self._first = 0
        self._later: list[Callable[[], None]] = []

    def enter(self, i: int, x: Value) -> Value:
        x = self._ends.enter(i, x)
        self._inputs, self._first = makers(differentiable(x)[0]), node_count()
        return x

    def leave(self, i: int, y: Value, checkpoint: Checkpoint | None) -> Value:
        inputs, self._inputs = self._inputs, set()
        made, ys = range(self._first, node_count()), differentiable(y)[0]
        at = i, self._place.j, self._place.device
        self._later.append(partial(watch_backward, self._recorder, *at, inputs, made, ys))
        return self._ends.leave(i, y, checkpoint)

    def sent(self) -> None:
        """Look at the nodes of the micro-batch whose output was sent."""
        while self._later:
            self._later.pop()()

    def drop(self) -> None:
        self._later.clear()
        self._ends.drop()


class LookAfterSending:
    """A link whose sender has something to look at afterwards."""

    __slots__ = ("_ends", "_link", "close", "receive")

    def __init__(self, link: Link, ends: RecordedEnds) -> None:
        self._link = link
        self._ends = ends
        self.receive = link.receive
        self.close = link.close

    def send(self, i: int, value: Value) -> None:
        self._link.send(i, value)
        self._ends.sent()
