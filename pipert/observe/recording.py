"""Takes moments on the clock of a device, which are dated when a recording is read.

On CPU a task is over when its function returns, and a moment is a ``perf_counter`` value. On CUDA
the task has only been queued by then. There a moment is an event in the stream, which the device
dates when it reaches it: the run is never synchronised. The two clocks are compared once, when a
recording begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from pipert.observe.event import Event

Stamp = float | torch.cuda.Event


def stamp(device: torch.device, stream: torch.cuda.Stream | None = None) -> Stamp:
    """Return the present moment on ``device``, in ``stream``, by default the current one."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream or torch.cuda.current_stream(device))
    return event


class Origin:
    """The beginning of a recording, by the clocks of the process and of each of the ``devices``.

    Waits until CUDA devices are idle, so that their clocks can be related to the process's.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._began = perf_counter()
        self._events: dict[torch.device, tuple[torch.cuda.Event, float]] = {}
        for device in set(devices):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                before = perf_counter()
                event = stamp(device)
                assert isinstance(event, torch.cuda.Event)
                event.synchronize()
                now = (before + perf_counter()) / 2  # the event was in between
                self._events[device] = event, now - self._began

    def knows(self, device: torch.device) -> bool:
        """Return whether stamps of ``device`` can be dated."""
        return device.type != "cuda" or device in self._events

    def date(self, moment: Stamp, device: torch.device) -> float:
        """Return the seconds since the beginning. Waits for a CUDA device to reach ``moment``."""
        if isinstance(moment, float):
            return moment - self._began
        event, offset = self._events[device]
        moment.synchronize()
        milliseconds: float = event.elapsed_time(moment)
        return offset + milliseconds / 1e3


@dataclass(slots=True)
class Span:
    """An event whose moments are not yet converted to seconds."""

    event: Event
    clock: torch.device
    """The device whose clock ``start`` and ``end`` are read from."""
    stream: torch.cuda.Stream | None
    """The stream that reads it; ``None`` for the current one."""
    start: Stamp
    end: Stamp | None = None

    def finish(self) -> None:
        """Note that the event ends now."""
        self.end = stamp(self.clock, self.stream)

    def dated(self, origin: Origin) -> Event:
        """Return the event, in seconds since ``origin``."""
        assert self.end is not None
        start, end = (origin.date(moment, self.clock) for moment in (self.start, self.end))
        return replace(self.event, start=start, end=max(start, end))
