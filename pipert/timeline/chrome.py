"""Converts a timeline to the Trace Event Format, which Perfetto and ``chrome://tracing`` read.

In the trace each device has a thread for its computation and one for its copies, and more where
events overlap, since the boxes of one thread must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipert.observe.event import COPY, Event

Record = dict[str, Any]


def chrome_trace(
    events: Sequence[Event], lanes: Sequence[str], workers: Sequence[int]
) -> dict[str, Any]:
    """Returns the trace of ``events``, in order of their start, as an object to write as JSON."""
    records: list[Record] = [_name("process_name", "pipert", 0)]
    threads = _threads(events, workers)
    numbers = {thread: number for number, thread in enumerate(sorted(set(threads)))}
    for (worker, copies, track), number in numbers.items():
        name = lanes[worker] + " copies" * copies + f" ({track + 1})" * bool(track)
        records.append(_name("thread_name", name, number))
    records += [_slice(e, numbers[thread]) for e, thread in zip(events, threads, strict=True)]
    return {"traceEvents": records, "displayTimeUnit": "ms"}


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


def _name(kind: str, name: str, thread: int) -> Record:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}


def _slice(event: Event, thread: int) -> Record:
    start, end = (round(1e6 * seconds, 3) for seconds in (event.start, event.end))
    args: Record = {
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
