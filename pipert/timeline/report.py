"""What the devices did with their time, and what would make better use of it.

Time counts while the pipe is at work: from the first to the last forward task of each call, and
from the first to the last task of its backward. What the training loop does in between, the loss,
the optimizer and the data, stands by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from pipert.recording.event import BACKWARD, COMPUTE, COPY, FORWARD, RECOMPUTE, WAIT, Event
from pipert.timeline.advice import Advice, Costs, advise
from pipert.timeline.intervals import Interval, length, overlap, union

__all__ = ["DeviceTimes", "Report"]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """What one device did, in seconds."""

    name: str
    busy: float
    """Computing, in forward, recomputation or backward."""
    forward: float
    recomputing: float
    backward: float
    waiting: float
    """Not computing while the pipe was at work: for input, for the caller's thread, for nothing."""
    for_input: float
    """Of that, seen to wait for an input or for a copy of it."""
    copying: float
    """Copies that came in."""
    hidden: float
    """Of these, while it computed."""


@dataclass(frozen=True, slots=True)
class Report:
    """What :meth:`Timeline.report` returns; ``str`` of it is the text."""

    calls: int
    micro_batches: int
    """Of the largest call."""
    seconds: float
    """From the first event to the last."""
    outside: float
    """Of these, when the pipe was not at work."""
    devices: tuple[DeviceTimes, ...]
    bubble: float
    """The share of the devices' time in which they did not compute, from 0 to 1."""
    forward_bubble: float
    backward_bubble: float | None
    """``None`` if there was no backward."""
    ideal_bubble: float
    """``(n-1)/(m+n-1)``, with n devices: what equal partitions and free copies would leave
    (section 2.1 of the paper)."""
    costs: tuple[Costs, ...]
    """What each partition takes for a micro-batch."""
    advice: tuple[Advice, ...]
    """What to do about it, by what it would bring at most."""

    def __str__(self) -> str:
        lines = [_headline(self), "", *_table(self), "", _bubble_line(self)]
        return "\n".join([*lines, *(f"* {one.text}" for one in self.advice)])

    __repr__ = __str__


def make_report(
    events: Sequence[Event],
    lanes: Sequence[str],
    workers: Sequence[int],
    devices: Sequence[torch.device],
    layers: Sequence[Sequence[float]] | None,
) -> Report:
    """See :meth:`Timeline.report`."""
    if not any(event.kind == FORWARD for event in events):
        raise ValueError(
            "there is no forward task in this timeline; call the pipe inside of 'with "
            "pipe.record() as timeline'"
        )
    forward, backward = _phases(events)
    work = union([*forward, *backward])
    forwards = [event for event in events if event.kind == FORWARD]
    m, w = 1 + max(event.i for event in forwards), len(lanes)
    seconds = max(event.end for event in events) - min(event.start for event in events)
    busy = [_times(events, lane, workers, COMPUTE) for lane in range(w)]
    costs = _costs(events, len(devices))
    times = tuple(_device(name, k, events, workers, work) for k, name in enumerate(lanes))
    outside = max(0.0, seconds - length(work))
    return Report(
        calls=len({event.run for event in forwards}),
        micro_batches=m,
        seconds=seconds,
        outside=outside,
        devices=times,
        bubble=_bubble(busy, work),
        forward_bubble=_bubble(busy, union(forward)),
        backward_bubble=_bubble(busy, union(backward)) if backward else None,
        ideal_bubble=(w - 1) / (m + w - 1),
        costs=costs,
        advice=advise(m, costs, lanes, workers, devices, layers, outside / seconds),
    )


def _phases(events: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """From the first to the last task of each call, forward and backward."""
    phases = []
    for kinds in ((FORWARD,), (RECOMPUTE, BACKWARD)):
        ends: dict[int, Interval] = {}
        for event in events:
            if event.kind in kinds:
                start, end = ends.get(event.run, (event.start, event.end))
                ends[event.run] = min(start, event.start), max(end, event.end)
        phases.append(list(ends.values()))
    return phases[0], phases[1]


def _times(
    events: Sequence[Event], lane: int, workers: Sequence[int], kinds: Collection[str]
) -> list[Interval]:
    """When that worker's device did something of those kinds."""
    of_lane = [event for event in events if event.kind in kinds and workers[event.j] == lane]
    return union((event.start, event.end) for event in of_lane)


def _device(
    name: str, lane: int, events: Sequence[Event], workers: Sequence[int], work: list[Interval]
) -> DeviceTimes:
    busy, forward, recomputing, first, copying, waiting = (
        _times(events, lane, workers, kinds)
        for kinds in (COMPUTE, {FORWARD}, {RECOMPUTE}, {FORWARD, RECOMPUTE}, {COPY}, {WAIT})
    )
    waited = overlap(waiting, work)
    return DeviceTimes(
        name=name,
        busy=length(busy),
        forward=length(forward),
        recomputing=length(recomputing),
        backward=length(busy) - length(first),  # a recomputation may be inside of a backward
        waiting=length(work) - length(overlap(busy, work)),
        for_input=length(waited) - length(overlap(waited, busy)),
        copying=length(copying),
        hidden=length(overlap(copying, busy)),
    )


def _bubble(busy: Sequence[list[Interval]], work: list[Interval]) -> float:
    """The share of the devices' time in ``work`` in which they did not compute."""
    return 1 - sum(length(overlap(one, work)) for one in busy) / (len(busy) * length(work))


def _costs(events: Sequence[Event], n: int) -> tuple[Costs, ...]:
    """What each partition takes for a micro-batch, as a rule: a task that was held up is none."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for event in events:
        if event.kind in COMPUTE:
            seconds.setdefault((event.kind, event.j), []).append(event.seconds)
    costs = []
    for j in range(n):
        forward, recompute, backward = (seconds.get((kind, j), []) for kind in COMPUTE)
        share = len(recompute) / max(1, len(forward))
        once, again, back = (median(of or [0.0]) for of in (forward, recompute, backward))
        costs.append(Costs(once, share * again, back))
    return tuple(costs)


def _headline(report: Report) -> str:
    inside = 100 - _percent(report.outside, report.seconds)
    return (
        f"{report.calls} calls of up to {report.micro_batches} micro-batches on "
        f"{len(report.devices)} devices in {report.seconds:.3f} s; the pipe was at work for "
        f"{inside}% of that. Shares of its work:"
    )


def _table(report: Report) -> Iterator[str]:
    columns = ("busy", "forward", "recomputing", "backward", "waiting", "for input", "copying")
    width = max(len(times.name) for times in report.devices)
    yield " " * width + "".join(f"{column:>13}" for column in columns)
    work = report.seconds - report.outside
    for times in report.devices:
        cells = (
            times.busy, times.forward, times.recomputing, times.backward, times.waiting,
            times.for_input, times.copying,
        )  # fmt: skip
        shares = "".join(f"{_percent(cell, work):>12}%" for cell in cells)
        yield f"{times.name:<{width}}{shares}"


def _bubble_line(report: Report) -> str:
    parts = [f"forward {100 * report.forward_bubble:.0f}%"]
    if report.backward_bubble is not None:
        parts.append(f"backward {100 * report.backward_bubble:.0f}%")
    return (
        f"Bubble: {100 * report.bubble:.0f}% of the devices' time ({', '.join(parts)}); "
        f"(n-1)/(m+n-1) is {100 * report.ideal_bubble:.0f}%."
    )


def _percent(part: float, whole: float) -> int:
    return round(100 * part / whole) if whole > 0 else 0
