"""Wraps the links and copies of a stage whose run is recorded or profiled.

They do the same: only hooks are added to the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.autograd import streams
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable
from pipert.layers.place import Place
from pipert.observe.backward import watch_node
from pipert.observe.event import COPY, WAIT
from pipert.observe.recorder import Recorder, Span
from pipert.stage.copies import Transport
from pipert.stage.links import Link

_CPU = torch.device("cpu")


def recorded_link(link: Link, recorder: Recorder, place: Place) -> Link:
    """Return a link like ``link`` that records how long its receiver, at ``place``, waits.

    Only for a receiver on CPU: a CUDA device waits for its input later, in its stream.
    """

    def receive(i: int) -> Value:
        with recorder.during(WAIT, i, place.j, place.device):
            return link.receive(i)

    return link._replace(receive=receive)


@dataclass(slots=True, eq=False)
class RecordedTransport:
    """A transport whose copies and waits are recorded, including those of the backward."""

    _transport: Transport
    _recorder: Recorder
    _place: Place

    def in_graph(self, tensor: Tensor) -> bool:
        return self._transport.in_graph(tensor)

    def copy(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        home, device, j = tensors[0].device, self._place.device, self._place.j
        size = sum(tensor.nbytes for tensor in tensors)
        clock, on = self._timed_by((home, source), (device, target))
        with self._recorder.during(COPY, i, j, device, clock, on) as span:
            span.source, span.origin, span.bytes = home, origin, size
            moved = self._transport.copy(i, tensors, source, target, origin)
        clock_back, on_back = self._timed_by((device, target), (home, source))

        def begin_gradient() -> Span:  # the graph holds this, so it must hold no tensor
            to = j if origin is None else origin
            span = self._recorder.begin(COPY, i, to, home, clock_back, on_back)
            span.source, span.origin, span.bytes = device, j, size
            return span

        watch_node(moved, begin_gradient, on_back)
        return moved

    def wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        compute = streams.compute_stream(self._place.device)
        if waiter == compute:  # compute waits for x, now
            with self._recorder.during(WAIT, i, self._place.j, self._place.device):
                return self._transport.wait(i, x, waiter, awaited)
        y = self._transport.wait(i, x, waiter, awaited)
        if awaited == compute:  # a copy waits for compute; in the backward, compute for a gradient
            begin = partial(self._recorder.begin, WAIT, i, self._place.j, self._place.device)
            xs = [tensor for tensor in differentiable(y)[0] if self.in_graph(tensor)]
            # Autograd runs that on the stream that is current here.
            watch_node(xs, begin, None)
        return y

    def _timed_by(
        self, source: tuple[torch.device, Stream], target: tuple[torch.device, Stream]
    ) -> tuple[torch.device, Stream]:
        """Return the clock and stream that time a copy: those of the first side on CUDA."""
        for device, on in (source, target):
            if on is not None and self._recorder.knows(device):
                return device, on
        return _CPU, None
