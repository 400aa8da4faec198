"""Records the spans of runs.

A :class:`Recording` belongs to one ``with pipe.record()``. A run has a :class:`Recorder` if any
recording is open when it begins, or a profiler is on; otherwise nothing is measured or created. A
recorder references neither the run nor the pipe, since the backward uses it, too.

Workers, threads of autograd and callers note spans at the same time: each list is only ever
appended to, which is atomic.

On CPU a task is over when its function returns, and a moment is a ``perf_counter`` value. On CUDA
the task has only been queued by then. There a moment is an event in the stream, which the device
dates when it reaches it: the run is never synchronised. The two clocks are compared once, when a
recording begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

    kind: str
    i: int
    j: int
    device: torch.device
    run: int
    clock: torch.device
    """The device whose clock ``start`` and ``end`` are read from."""
    start: Stamp
    end: Stamp | None = None
    source: torch.device | None = None
    origin: int | None = None
    bytes: int = 0

    def dated(self, origin: Origin) -> Event:
        """Return the event, in seconds since ``origin``."""
        assert self.end is not None
        start = origin.date(self.start, self.clock)
        end = origin.date(self.end, self.clock)
        return Event(
            self.kind, self.i, self.j, self.device, start, max(start, end), self.run,
            self.source, self.origin, self.bytes,
        )  # fmt: skip


class Recording:
    """The spans of the runs that began while it was open.

    It begins when the CUDA devices among the pipe's ``devices`` are idle.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.origin = Origin(devices)
        self.spans: list[Span] = []
        self.steps: set[int] = set()  # the runs whose backward is done by the workers
        self.failed: set[int] = set()  # the runs that did not succeed, even if they recorded spans
        self.in_one: dict[str, None] = {}  # why calls had one micro-batch, though more were asked
        self.is_open = True

    def events(self) -> list[Event]:
        """Return the events that are over, in order of start. Waits for their CUDA devices."""
        events = [span.dated(self.origin) for span in list(self.spans) if span.end is not None]
        return sorted(events, key=lambda event: (event.start, event.end))

    def close(self) -> None:
        """Keep the spans that have ended, and record no more."""
        self.is_open = False
        self.spans = [span for span in self.spans if span.end is not None]

    def __repr__(self) -> str:
        return f"<Recording of {len(self.spans)} spans{'' if self.is_open else ', closed'}>"


class Recorder:
    """Records the spans of one run in the recordings that are open when it begins.

    There are none if only a profiler is on. ``goes_back`` says that workers go backward in this
    run, too, which the recordings note.
    """

    def __init__(
        self, run: int, recordings: Sequence[Recording], goes_back: bool = False
    ) -> None:
        self.run = run
        self._recordings = tuple(recordings)
        for recording in self._recordings if goes_back else ():
            recording.steps.add(run)

    def __bool__(self) -> bool:
        """Return whether any recording keeps spans."""
        return any(recording.is_open for recording in self._recordings)

    def knows(self, device: torch.device) -> bool:
        """Return whether stamps of ``device`` can be dated."""
        return all(recording.origin.knows(device) for recording in self._recordings)

    def begin(
        self, kind: str, i: int, j: int, device: torch.device,
        clock: torch.device | None = None, on: torch.cuda.Stream | None = None,
    ) -> Span:  # fmt: skip
        """Begin a span, which is shown once it has an end."""
        clock = clock or device
        recordings = [recording for recording in self._recordings if recording.is_open]
        start = stamp(clock, on) if recordings else 0.0
        span = Span(kind, i, j, device, self.run, clock, start)
        for recording in recordings:
            recording.spans.append(span)
        return span

    def end(self, span: Span, on: torch.cuda.Stream | None = None) -> None:
        """End ``span``."""
        if self:
            span.end = stamp(span.clock, on)

    def fail(self) -> None:
        """Note that the run has failed, or was cancelled."""
        for recording in self._recordings:
            recording.failed.add(self.run)

    @contextlib.contextmanager
    def during(
        self, kind: str, i: int, j: int, device: torch.device,
        clock: torch.device | None = None, on: torch.cuda.Stream | None = None,
    ) -> Iterator[Span]:  # fmt: skip
        """Record a span of what is done inside.

        If that fails, the span ends only on CPU: on a CUDA device that has failed, asking for the
        time fails as well, and the first error is the one that matters.
        """
        span = self.begin(kind, i, j, device, clock, on)
        try:
            yield span
        except BaseException:
            if span.clock.type != "cuda":
                self.end(span)
            raise
        self.end(span, on)
