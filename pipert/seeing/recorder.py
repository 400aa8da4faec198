"""What the stages of one run tell, and the recordings that keep it.

A :class:`Recording` belongs to one ``with pipe.record()``. A run has a :class:`Recorder` if any
recording is open when it begins, or a profiler is looking; else nothing
is measured or made. A recorder references neither the run nor the pipe, since the backward
uses it, too.

Spans are noted by workers, by threads of autograd and by callers at once: each list is only ever
appended to, which is atomic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from pipert.seeing.event import Event
from pipert.seeing.stamp import Origin, Stamp, stamp

__all__: list[str] = []


@dataclass(slots=True)
class Span:
    """An event that is not dated yet."""

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
    layers: Sequence[Stamp] = ()
    """Of a forward: when it began, and when each of its layers was done."""

    def dated(self, by: Origin) -> Event:
        """As an event."""
        assert self.end is not None
        start = by.date(self.start, self.clock)
        end = by.date(self.end, self.clock)
        return Event(
            self.kind, self.i, self.j, self.device, start, max(start, end), self.run,
            self.source, self.origin, self.bytes,
        )  # fmt: skip


class Recording:
    """The spans of the runs that began while it was open.

    It begins when those of the pipe's ``devices`` that are on CUDA are idle.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.origin = Origin(devices)
        self.spans: list[Span] = []
        self.steps: set[int] = set()  # the runs whose backward is done by the workers
        self.failed: set[int] = set()  # the runs that did not succeed, whatever they have recorded
        self.is_open = True

    def events(self) -> list[Event]:
        """What is over, in the order in which it began. Waits for the CUDA devices to get there."""
        events = [span.dated(self.origin) for span in list(self.spans) if span.end is not None]
        return sorted(events, key=lambda event: (event.start, event.end))

    def layer_seconds(self, j: int, layers: int) -> list[float]:
        """The median of what each of a partition's layers took in a forward task; none if none ran.

        A task that failed did not reach its last layer.
        """
        tasks = []
        for span in list(self.spans):
            if span.j == j and span.end is not None and len(span.layers) == layers + 1:
                dates = [self.origin.date(moment, span.clock) for moment in span.layers]
                tasks.append([after - before for before, after in pairwise(dates)])
        return [median(layer) for layer in zip(*tasks, strict=True)]

    def close(self) -> None:
        """Keep what is over; note nothing more."""
        self.is_open = False
        self.spans = [span for span in self.spans if span.end is not None]

    def __repr__(self) -> str:
        return f"<Recording of {len(self.spans)} spans{'' if self.is_open else ', closed'}>"


class Recorder:
    """One run's, for the recordings that are open as it begins: none if only a profiler looks.

    They note the runs that ``goes_back`` is said of, in which the workers go backward, too.
    """

    def __init__(
        self, run: int, recordings: Sequence[Recording], goes_back: bool = False
    ) -> None:
        self.run = run
        self._recordings = tuple(recordings)
        for recording in self._recordings if goes_back else ():
            recording.steps.add(run)

    def __bool__(self) -> bool:
        """Whether anybody keeps spans."""
        return any(recording.is_open for recording in self._recordings)

    def knows(self, device: torch.device) -> bool:
        """Whether stamps of ``device`` can be dated."""
        return all(recording.origin.knows(device) for recording in self._recordings)

    def begin(
        self, kind: str, i: int, j: int, device: torch.device,
        clock: torch.device | None = None, on: torch.cuda.Stream | None = None,
    ) -> Span:  # fmt: skip
        """A span that begins now; seen when it has an end."""
        clock = clock or device
        recordings = [recording for recording in self._recordings if recording.is_open]
        start = stamp(clock, on) if recordings else 0.0
        span = Span(kind, i, j, device, self.run, clock, start)
        for recording in recordings:
            recording.spans.append(span)
        return span

    def end(self, span: Span, on: torch.cuda.Stream | None = None) -> None:
        """What began as ``span`` is over."""
        if self:
            span.end = stamp(span.clock, on)

    def after_layer(self, span: Span) -> Callable[[], None] | None:
        """What is called after each layer of a forward, to note when it was done; if anybody keeps.
        """
        if not self:
            return None
        span.layers = moments = [span.start]
        return lambda: moments.append(stamp(span.clock))

    def fail(self) -> None:
        """Note that the run has failed, or was cancelled."""
        for recording in self._recordings:
            recording.failed.add(self.run)

    @contextlib.contextmanager
    def during(
        self, kind: str, i: int, j: int, device: torch.device,
        clock: torch.device | None = None, on: torch.cuda.Stream | None = None,
    ) -> Iterator[Span]:  # fmt: skip
        """A span of what is done inside.

        Of what fails there is one on CPU alone: on a CUDA device that has failed, asking for the
        time fails as well, and what matters is the first error.
        """
        span = self.begin(kind, i, j, device, clock, on)
        try:
            yield span
        except BaseException:
            if span.clock.type != "cuda":
                self.end(span)
            raise
        self.end(span, on)

    def __repr__(self) -> str:
        return f"<Recorder of run {self.run}>"
