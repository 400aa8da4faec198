"""Holds timed events of each device, recorded from a pipe or made by the user, and shows them.

A picture is like figure 8 of the paper and needs matplotlib (the extra ``plot``). It uses a figure
of its own and not ``pyplot``, which keeps state for the whole process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pipert.observe.event import (
    BACKWARD,
    COPY,
    FORWARD,
    RECOMPUTE,
    WAIT,
    WEIGHT,
    Event,
)
from pipert.observe.report import Report, make_report
from pipert.workers.pool import assign_workers

__all__ = ["Timeline"]

# The colours of a box and of the micro-batch's number in it, from back to front.
_COLOURS = {
    COPY: ("#e45756", None),
    FORWARD: ("#4c78a8", "white"),
    BACKWARD: ("#59a14f", "white"),
    WEIGHT: ("#b6d7a8", "black"),
    RECOMPUTE: ("#9ecae9", "black"),
    WAIT: ("#ececec", None),
}

Stamp = float | torch.cuda.Event


def stamp(device: torch.device, stream: torch.cuda.Stream | None = None) -> Stamp:
    """Return the present moment on ``device``, in ``stream``, by default the current one.

    On CPU a task is over when its function returns. On CUDA the task has only been queued by then:
    there a moment is an event, which the device dates when it reaches it.
    """
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream or torch.cuda.current_stream(device))
    return event


class Origin:
    """The beginning of a recording, by the clocks of the process and of each of the ``devices``.

    Waits until CUDA devices are idle, so that their clocks can be related to the process's. Runs
    are never synchronised.
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


class Timeline:
    """The events of a pipe. :meth:`Pipe.record` makes one; you can also build one from your own.

    Args:
        events: in any order.
        devices: the device of each partition.
        workers: the worker of each partition, counted from 0. Default: as in a pipe, one per
            CUDA device and per ``'cpu'``.
    """

    def __init__(
        self,
        events: Iterable[Event],
        devices: Sequence[torch.device | str],
        workers: Sequence[int] | None = None,
    ) -> None:
        self.devices = tuple(torch.device(device) for device in devices)
        """The device of each partition."""
        self._workers = tuple(assign_workers(self.devices) if workers is None else workers)
        self.failed = set[int]()
        """The calls that failed or were cancelled, which the report leaves out."""
        self._events = tuple(events)
        # Of a recording. Threads note spans at the same time: the list is only ever appended to,
        # which is atomic. It references neither a run nor the pipe.
        self._spans: list[Span] = []
        self._origin = Origin(())
        self._is_open = False
        self._in_one: dict[str, None] = {}  # why calls had one micro-batch, though more were asked

    @property
    def events(self) -> tuple[Event, ...]:
        """All finished events, in order of their start. Waits for those on CUDA."""
        is_over = not self._is_open  # asked first, so that no event is missed
        spans = [span for span in list(self._spans) if span.end is not None]
        events = [*self._events, *[span.dated(self._origin) for span in spans]]
        events.sort(key=lambda event: (event.start, event.end))
        if is_over:
            self._events, self._spans = tuple(events), []
        return tuple(events)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The workers' names: ``'cuda:0'``, or ``'cpu 0'`` for a logical CPU device."""
        pairs = zip(self._workers, self.devices, strict=True)
        names = {w: f"cpu {w}" if device.type == "cpu" else str(device) for w, device in pairs}
        return tuple(names[worker] for worker in sorted(names))

    def lane(self, event: Event) -> int:
        """Returns an event's index in :attr:`lanes`; a copy belongs to its destination."""
        return self._workers[event.partition]

    def report(self) -> Report:
        """Reports how the devices spent their time, and how to use it better.

        ``print(timeline.report())`` shows it; its fields hold the figures.

        Raises:
            ValueError: the timeline has no forward task.
        """
        about = self.events, self.lanes, self._workers, self.devices
        return make_report(*about, self.failed, self._in_one)

    def save(self, path: str | Path) -> None:
        """Write a trace that Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` open.

        It has a lane for each device's computation and one for its copies, and more where events
        overlap, since the boxes of a lane must not.
        """
        events, lanes = self.events, self.lanes
        records = [_name("process_name", "pipert", 0)]
        threads = _threads(events, self._workers)
        numbers = {thread: number for number, thread in enumerate(sorted(set(threads)))}
        for (worker, copies, track), number in numbers.items():
            name = lanes[worker] + " copies" * copies + f" ({track + 1})" * bool(track)
            records.append(_name("thread_name", name, number))
        records += [_slice(e, numbers[thread]) for e, thread in zip(events, threads, strict=True)]
        trace = {"traceEvents": records, "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace, default=str), encoding="utf-8")

    def plot(self, path: str | Path, title: str | None = None) -> None:
        """Draw the timeline as the paper does: a lane for each device, a box for each task.

        Args:
            path: its suffix selects the format: ``.png``, ``.svg`` or ``.pdf``.
            title: written above the picture.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: there are no events.
        """
        if not self.events:
            raise ValueError("there is nothing to draw; call the pipe inside 'with pipe.record()'")
        save_picture({title or "": self}, path)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self.lanes)}>"  # reading events may take long


def _threads(events: Sequence[Event], workers: Sequence[int]) -> list[tuple[int, bool, int]]:
    """Returns each event's thread: its worker, whether it is a copy, and a track without overlap.

    There are several tracks if several callers run backward at once, or copies overlap.
    """
    ends: dict[tuple[int, bool], list[float]] = {}
    threads = []
    for event in events:
        key = workers[event.partition], event.kind == COPY
        tracks = ends.setdefault(key, [])
        free = (k for k, end in enumerate(tracks) if end <= event.start)
        track = next(free, len(tracks))
        tracks[track : track + 1] = [event.end]
        threads.append((*key, track))
    return threads


def _name(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}


def _slice(event: Event, thread: int) -> dict[str, Any]:
    start, end = (round(1e6 * seconds, 3) for seconds in (event.start, event.end))
    names = ["run", "micro_batch", "partition", "device"]
    names += ["source", "bytes"] if event.kind == COPY else []
    return {
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "name": event.name,
        "cat": event.kind,
        "ts": start,
        "dur": round(end - start, 3),  # so that rounding pushes no box into the next one
        "args": {name: getattr(event, name) for name in names},
    }


def save_picture(timelines: Mapping[str, Timeline], path: str | Path, width: float = 12.0) -> None:
    """Draw each timeline under its title, all to the same scale, ``width`` inches wide."""
    # Fixed salt, no dates: equal timelines give equal files. The text of an SVG stays text.
    with import_module("matplotlib").rc_context({"svg.hashsalt": "pipert", "svg.fonttype": "none"}):
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure, suffix = _figure(timelines, width), Path(path).suffix.lower()
        figure.savefig(path, dpi=150, metadata=metadata.get(suffix))


def _figure(timelines: Mapping[str, Timeline], width: float) -> Any:
    heights = [1 + len(timeline.lanes) for timeline in timelines.values()]
    figure = import_module("matplotlib.figure").Figure(
        figsize=(width, 0.8 + 0.42 * sum(heights)), layout="constrained"
    )
    grid = {"height_ratios": heights}
    inch = max([end - start for start, end in map(_span, timelines.values())]) / width
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    for axes, (title, timeline) in zip(rows, timelines.items(), strict=True):
        _draw(axes, timeline, inch)
        axes.set_title(title, loc="left", fontsize=10)
    rows[-1].set_xlabel("milliseconds")
    kinds = {event.kind for timeline in timelines.values() for event in timeline.events}
    patch = import_module("matplotlib.patches").Patch
    shown = [patch(color=colour, label=k) for k, (colour, _) in _COLOURS.items() if k in kinds]
    figure.legend(
        handles=shown, loc="outside upper right", ncols=len(_COLOURS), frameon=False, fontsize=8
    )
    return figure


def _span(timeline: Timeline) -> tuple[float, float]:
    """Return when the first event begins, and when the last one ends."""
    times = [time for event in timeline.events for time in (event.start, event.end)] or [0.0]
    return min(times), max(times)


def _draw(axes: Any, timeline: Timeline, inch: float) -> None:
    """Draws the lanes one below the other, with copies as a thin bar under the tasks.

    Args:
        inch: the seconds that an inch shows; numbers are left out where they do not fit.
    """
    start, _ = _span(timeline)
    for event in sorted(timeline.events, key=lambda event: [*_COLOURS].index(event.kind)):
        colour, text = _COLOURS[event.kind]
        left, length, number = event.start - start, event.seconds, str(event.micro_batch)
        top, height = (0.26, 0.16) if event.kind == COPY else (-0.4, 0.62)
        y = timeline.lane(event) + top + height / 2
        edge = "white" if text else "none"
        axes.barh(y, 1e3 * length, height, 1e3 * left, color=colour, edgecolor=edge, linewidth=0.4)
        if text and length > 0.07 * len(number) * inch:
            axes.text(
                1e3 * (left + length / 2), y, number, ha="center", va="center", fontsize=7,
                color=text, clip_on=True,
            )  # fmt: skip
    axes.set_yticks(range(len(timeline.lanes)), timeline.lanes)
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)  # the first lane on top
    axes.spines[["top", "right"]].set_visible(False)
