"""A timeline in the Trace Event Format, which Perfetto and ``chrome://tracing`` read.

Each device has a thread for what it computes and one for its copies. Arrows go from ``F[i,j]`` to
``F[i,j+1]`` and from ``B[i,j+1]`` to ``B[i,j]``, by way of the copy if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipert.recording.event import BACKWARD, COPY, FORWARD, RECOMPUTE, WAIT, Event

__all__: list[str] = []

Record = dict[str, Any]

# The names of colours that both programs know.
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
    """The trace as an object to be written as JSON.

    Args:
        events: of one timeline.
        lanes: the names of the workers.
        workers: the worker of each partition.
    """
    records: list[Record] = [_name("process_name", "pipert", 0)]
    for worker, lane in enumerate(lanes):
        records.append(_name("thread_name", lane, 2 * worker))
    for worker in sorted({workers[event.j] for event in events if event.kind == COPY}):
        records.append(_name("thread_name", f"{lanes[worker]} copies", 2 * worker + 1))
    records += [_slice(event, _thread(event, workers)) for event in events]
    for number, (before, after) in enumerate(_arrows(events)):
        at = _microseconds(before.end - min(before.seconds / 2, 1e-7))  # inside of its box
        start = {"ph": "s", "ts": at, "tid": _thread(before, workers)}
        end = {"ph": "f", "ts": _microseconds(after.start), "tid": _thread(after, workers)}
        shared = {"pid": 0, "id": number, "name": "then", "cat": "order"}
        records += [{**shared, **start}, {**shared, **end, "bp": "e"}]
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def _name(what: str, name: str, thread: int) -> Record:
    return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": {"name": name}}


def _thread(event: Event, workers: Sequence[int]) -> int:
    return 2 * workers[event.j] + (event.kind == COPY)


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _slice(event: Event, thread: int) -> Record:
    args: Record = {"run": event.run, "i": event.i, "j": event.j, "clock": event.clock}
    args["device"] = str(event.device)
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
        "dur": _microseconds(event.seconds),
        "args": args,
    }


def _arrows(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Pairs of events of which the second one needs what the first one made."""
    tasks: dict[tuple[str, int, int, int], Event] = {}
    for event in events:  # of a backward that was run twice, the last one
        if event.kind in (FORWARD, BACKWARD):
            tasks[event.kind, event.run, event.i, event.j] = event
    arrows, copied = [], set()
    for copy in events:
        if copy.kind != COPY or copy.origin is None:
            continue
        kind = FORWARD if copy.origin < copy.j else BACKWARD
        before = tasks.get((kind, copy.run, copy.i, copy.origin))
        after = tasks.get((kind, copy.run, copy.i, copy.j))
        if before is not None and after is not None:
            arrows += [(before, copy), (copy, after)]
            copied.add((kind, copy.run, copy.i, copy.origin, copy.j))
    for (kind, run, i, j), before in tasks.items():
        to = j + 1 if kind == FORWARD else j - 1
        after = tasks.get((kind, run, i, to))
        if after is not None and (kind, run, i, j, to) not in copied:
            arrows.append((before, after))
    return arrows
