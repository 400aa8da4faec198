"""Holds timed events of each device, recorded from a pipe or made by the user."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipert.model.devices import assign_workers
from pipert.observe.event import COPY, KINDS, Event
from pipert.observe.recording import Recording
from pipert.observe.run_trace import Trace
from pipert.timeline.picture import save_picture
from pipert.timeline.report import Advice, Report, make_report

__all__ = ["Timeline"]


class Timeline:
    """The events of a pipe. :meth:`Pipe.record` makes one; you can also build one from your own.

    Args:
        events: in any order.
        devices: the device of each partition.
        workers: the worker of each partition, counted from 0. Default: as in a pipe, one per
            CUDA device and per ``'cpu'``.
        steps: the numbers of the calls of ``forward_backward``. Default: none.
        failed: the numbers of the calls that failed or were cancelled. Default: none.

    Raises:
        ValueError: the arguments are inconsistent; the first bad event is named.
    """

    def __init__(
        self,
        events: Iterable[Event],
        devices: Sequence[torch.device | str],
        workers: Sequence[int] | None = None,
        steps: Iterable[int] = (),
        failed: Iterable[int] = (),
    ) -> None:
        self._events = tuple(sorted(events, key=lambda event: (event.start, event.end)))
        self._devices = tuple(torch.device(device) for device in devices)
        self._workers = tuple(assign_workers(list(self._devices)) if workers is None else workers)
        self._steps = set(steps)
        self._failed = set(failed)
        self._recording: Recording | None = None  # what they are read from
        n = len(self._devices)
        for event in self._events:
            if event.kind not in KINDS or not 0 <= event.partition < n:
                raise ValueError(f"{event} is of no kind in {KINDS}, or not in {n} partitions")

    @property
    def events(self) -> tuple[Event, ...]:
        """All finished events, in order of their start. Waits for those on CUDA."""
        recording = self._recording
        if recording is None or self._events:
            return self._events
        is_over = not recording.is_open  # asked first, so that no event is missed
        events = tuple(recording.events())
        if is_over:
            self._events = events
        return events

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each partition."""
        return self._devices

    @property
    def lanes(self) -> tuple[str, ...]:
        """The workers' names: ``'cuda:0'``, or ``'cpu 0'`` for a logical CPU device."""
        names = {
            worker: f"cpu {worker}" if device.type == "cpu" else str(device)
            for worker, device in zip(self._workers, self._devices, strict=True)
        }
        return tuple(names[worker] for worker in sorted(names))

    def lane(self, event: Event) -> int:
        """Returns an event's index in :attr:`lanes`; a copy belongs to its destination."""
        return self._workers[event.partition]

    @property
    def steps(self) -> frozenset[int]:
        """The calls of ``forward_backward``, in which workers also run the backward."""
        return frozenset(self._steps)

    @property
    def failed(self) -> frozenset[int]:
        """The calls that failed or were cancelled, which the report leaves out."""
        return frozenset(self._failed)

    def report(self) -> Report:
        """Reports how the devices spent their time, and how to use it better.

        ``print(timeline.report())`` shows it; its fields hold the figures.

        Raises:
            ValueError: the timeline has no forward task.
        """
        report = make_report(
            self.events, self.lanes, self._workers, self._devices, self.steps, self.failed
        )
        in_one = () if self._recording is None else tuple(self._recording.in_one)
        advice = [Advice("chunks", text) for text in in_one]
        return replace(report, advice=(*advice, *report.advice))

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
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

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


@contextmanager
def record(
    trace: Trace, devices: Sequence[torch.device], workers: Sequence[int]
) -> Iterator[Timeline]:
    """Record the calls of a pipe that begin inside the block; references only its trace."""
    recording, timeline = Recording(devices), Timeline((), devices, workers)
    timeline._recording = recording
    timeline._steps, timeline._failed = recording.steps, recording.failed  # which grow
    trace.start_recording(recording)
    try:
        yield timeline
    finally:
        trace.stop_recording(recording)


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
    args: dict[str, Any] = {
        "run": event.run, "micro_batch": event.micro_batch, "partition": event.partition,
        "clock": event.clock, "device": str(event.device),
    }  # fmt: skip
    if event.kind == COPY:
        args.update(source=str(event.source), bytes=event.bytes)
    return {
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "name": event.name,
        "cat": event.kind,
        "ts": start,
        "dur": round(end - start, 3),  # so that rounding pushes no box into the next one
        "args": args,
    }
