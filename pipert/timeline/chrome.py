"""Converts a timeline to the Trace Event Format, which Perfetto and ``chrome://tracing`` read.

In the trace each device has a thread for its computation and one for its copies, and more where
events overlap, since the boxes of one thread must not. Arrows go from ``F[i,j]`` to ``F[i,j+1]``
and from ``B[i,j+1]`` to ``B[i,j]``, through the copy if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipert.observe.event import BACKWARD, COPY, FORWARD, RECOMPUTE, WAIT, Event

__all__: list[str] = []

Record = dict[str, Any]

# Names of colours that both programs know.
_COLOURS = {
    FORWARD: "thread_state_running",
    RECOMPUTE: "thread_state_iowait",
    BACKWARD: "thread_state_runnable",
    COPY: "terrible",
    WAIT: "grey",
}


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
    tids = {id(event): numbers[thread] for event, thread in zip(events, threads, strict=True)}
    records += [_slice(event, tids[id(event)]) for event in events]
    for number, (before, after) in enumerate(_arrows(events)):
        # Inside both boxes, and never backwards: an input may arrive before its producer has ended.
        middle = before.start + before.seconds / 2
        start = max(middle, min(before.end - 1e-7, after.start))
        end = max(start, after.start)
        if end <= after.end:
            shared = {"pid": 0, "id": number, "name": "then", "cat": "order"}
            ends = ({"ph": "s"}, start, before), ({"ph": "f", "bp": "e"}, end, after)
            for phase, moment, event in ends:
                where = {"ts": _microseconds(moment), "tid": tids[id(event)]}
                records.append({**shared, **phase, **where})
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


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _slice(event: Event, thread: int) -> Record:
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
        "cname": _COLOURS[event.kind],
        "ts": _microseconds(event.start),
        "dur": round(_microseconds(event.end) - _microseconds(event.start), 3),
        "args": args,
    }


def _arrows(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Returns pairs of events of which the second needs the first one's result."""
    tasks: dict[tuple[str, int, int, int], Event] = {}
    for event in events:  # of a backward that is split or runs twice, the last piece counts
        if event.kind in (FORWARD, BACKWARD):
            tasks[event.kind, event.run, event.micro_batch, event.partition] = event
    arrows, copied = [], set()
    for copy in events:
        if copy.kind != COPY or copy.origin is None or copy.origin == copy.partition:
            continue
        kind = FORWARD if copy.origin < copy.partition else BACKWARD
        before = tasks.get((kind, copy.run, copy.micro_batch, copy.origin))
        after = tasks.get((kind, copy.run, copy.micro_batch, copy.partition))
        if before is not None and after is not None:
            arrows += [(before, copy), (copy, after)]
            copied.add((kind, copy.run, copy.micro_batch, copy.origin, copy.partition))
    for (kind, run, i, j), before in tasks.items():
        neighbour = j + 1 if kind == FORWARD else j - 1
        after = tasks.get((kind, run, i, neighbour))
        if after is not None and (kind, run, i, j, neighbour) not in copied:
            arrows.append((before, after))
    return arrows
