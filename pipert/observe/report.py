"""Reports how the devices spent their time, and how to use it better.

The pipe is at work from the first to the last forward task of each call, and from the first to the
last task of its backward; in a step, from the first to the last task. The training loop's work in
between (loss, optimizer, data) is left out. Advice names what holds the pipe back; ``plan_for``
predicts what would be faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from textwrap import wrap

import torch

from pipert.observe.event import COMPUTE, FORWARD, RECOMPUTE, WAIT, Event

__all__ = ["DeviceTimes", "Report"]

_COLUMNS = ("busy", "forward", "recomputing", "backward", "waiting")
_MUCH = 0.05  # smaller shares are within the noise of the measurements


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """The seconds that one device spent on each kind of activity."""

    name: str
    busy: float
    """Computing: forward, recomputation or backward."""
    forward: float
    recomputing: float
    backward: float
    """Including deferred gradients of weights."""
    waiting: float
    """Not computing while the pipe was at work: waiting for input or the caller, or idle."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of :meth:`Timeline.report`: figures as fields, and a text as ``str``."""

    calls: int
    """Complete calls; failed and unfinished ones are left out of all figures."""
    incomplete: int
    """Failed and unfinished calls."""
    micro_batches: int
    """The usual number per call."""
    seconds: float
    """The time from the first event to the last."""
    outside: float
    """The part of ``seconds`` when the pipe was not at work."""
    devices: tuple[DeviceTimes, ...]
    bubble: float
    """The share of the devices' time at work in which they did not compute, from 0 to 1."""
    ideal_bubble: float
    """The :attr:`bubble` of equal partitions with free copies: ``(n-1)/(m+n-1)`` (section 2.1 of
    the paper)."""
    costs: tuple[float, ...]
    """The seconds that a micro-batch takes in each partition."""
    advice: tuple[str, ...]
    """What holds the pipe back, and what may help."""

    def __str__(self) -> str:
        work, columns = self.seconds - self.outside, _COLUMNS
        left_out = f" ({self.incomplete} incomplete left out)" * bool(self.incomplete)
        width = max(len(times.name) for times in self.devices)
        lines = [
            f"Calls: {self.calls}{left_out}, micro-batches: {self.micro_batches}, seconds: "
            f"{self.seconds:.3f}, at work for {_percent(work, self.seconds)}%. Of this time:",
            "",
            " " * width + "".join(f"{column:>13}" for column in columns),
        ]
        for times in self.devices:
            shares = [f"{_percent(getattr(times, column), work):>12}%" for column in columns]
            lines.append(f"{times.name:<{width}}{''.join(shares)}")
        lines += ["", f"Bubble: {100 * self.bubble:.0f}% of the devices' time; equal partitions "
                  f"would leave {100 * self.ideal_bubble:.0f}%."]  # fmt: skip
        for advice in self.advice:
            lines += wrap(f"* {advice}", 100, subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__


def make_report(
    events: Sequence[Event],
    lanes: Sequence[str],
    workers: Sequence[int],
    devices: Sequence[torch.device],
    failed: set[int],
    advice: Iterable[str],
) -> Report:
    """Makes the result of :meth:`Timeline.report`."""
    sizes, incomplete = _calls(events, len(devices), failed)
    events = [event for event in events if event.run in sizes]
    if not events:
        lost = f", and {len(incomplete)} that failed or were cut off" * bool(incomplete)
        raise ValueError(
            f"there is no complete call in this timeline{lost}; call the pipe inside 'with "
            "pipe.record() as timeline', and its backward, too"
        )
    at_work = length(_at_work(events))
    m, n = int(median_low(sizes.values())), len(lanes)
    seconds = max(event.end for event in events) - min(event.start for event in events)
    of_lanes = [[e for e in events if workers[e.partition] == lane] for lane in range(n)]
    times = tuple(_device(name, own, at_work) for name, own in zip(lanes, of_lanes, strict=True))
    report = Report(
        calls=len(sizes),
        incomplete=len(incomplete),
        micro_batches=m,
        seconds=seconds,
        outside=max(0.0, seconds - at_work),
        devices=times,
        bubble=sum(each.waiting for each in times) / (n * at_work or 1.0),
        ideal_bubble=(n - 1) / (m + n - 1),
        costs=_costs(events, len(devices)),
        advice=(),
    )
    return replace(report, advice=(*advice, *_advice(report, workers, devices)))


def _calls(
    events: Sequence[Event], n: int, failed: set[int]
) -> tuple[dict[int, int], set[int]]:
    """Returns the number of micro-batches of each complete call, and the incomplete calls.

    A complete call has not failed, and each micro-batch has been through the last partition.
    """
    begun, ended = dict[int, int](), dict[int, int]()  # micro-batches of each call
    for event in events:
        if event.kind == FORWARD:
            begun[event.run] = max(begun.get(event.run, 0), 1 + event.micro_batch)
            if event.partition == n - 1:
                ended[event.run] = ended.get(event.run, 0) + 1
    complete = {run: m for run, m in begun.items() if run not in failed and ended.get(run) == m}
    return complete, {event.run for event in events} - set(complete)


def _at_work(events: Sequence[Event]) -> list[Interval]:
    """Returns the times at which the pipe was at work: forward, and backward.

    A phase does not simply last from its first to its last task, since a call may run backward
    twice, with a pause in between: a gap longer than any task.
    """
    phases: dict[tuple[int, bool], list[Interval]] = {}
    for event in events:
        if event.kind in COMPUTE:
            phase = phases.setdefault((event.run, event.kind == FORWARD), [])
            phase.append((event.start, event.end))
    work: list[Interval] = []
    for tasks in phases.values():
        work += union(tasks, gap=max(end - start for start, end in tasks))
    return union(work)


def _device(name: str, events: Sequence[Event], at_work: float) -> DeviceTimes:
    kinds = COMPUTE, (FORWARD,), (RECOMPUTE,), (FORWARD, RECOMPUTE)
    busy, forward, recomputing, first = (seconds_of(events, each) for each in kinds)
    # A recomputation may be inside a backward.
    return DeviceTimes(name, busy, forward, recomputing, busy - first, at_work - busy)


def _costs(events: Sequence[Event], n: int) -> tuple[float, ...]:
    """Returns the mean seconds that a micro-batch takes in each partition."""
    costs = []
    for j in range(n):
        own = [event for event in events if event.partition == j]
        tasks = {(event.run, event.micro_batch) for event in own}
        costs.append(seconds_of(own, COMPUTE) / max(1, len(tasks)))
    return tuple(costs)


def _advice(
    report: Report, workers: Sequence[int], devices: Sequence[torch.device]
) -> Iterator[str]:
    """Yields what is worth a change."""
    n, lanes, costs = len(devices), report.devices, report.costs
    cpus = sum(device.type == "cpu" for device in devices)
    # Nothing can be moved between partitions on one device; devices of two types differ in speed.
    if n > 1 and len(lanes) == n and cpus in (0, n) and sum(costs) > 0:
        slowest, ratio = costs.index(max(costs)), max(costs) * n / sum(costs)
        if ratio >= 1 + _MUCH:
            yield (
                f"partition {slowest} on {lanes[workers[slowest]].name} is the slowest: "
                f"{1e3 * costs[slowest]:.2f} ms for a micro-batch, {ratio:.2f} of the mean"
            )
    work = report.seconds - report.outside
    recomputing = sum(each.recomputing for each in lanes) / (len(lanes) * work or 1.0)
    if max(report.bubble, recomputing) >= _MUCH:
        yield (
            f"devices waited for {100 * report.bubble:.0f}% of their time and recomputed for "
            f"{100 * recomputing:.0f}%: pipert.plan_for searches the balance, chunks, schedule and "
            "checkpoint of the fastest step that fits the memory"
        )


def _percent(part: float, whole: float) -> int:
    return round(100 * part / whole) if whole > 0 else 0


Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Returns disjoint intervals that cover the same time, and gaps of at most ``gap`` as well."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def seconds_of(events: Iterable[Event], kinds: Collection[str]) -> float:
    """Returns the seconds in which there was an event of one of these kinds.

    Less the waits inside of tasks, as those of any model have where a CUDA device uses an input.
    """
    spans, waits = list[Interval](), list[Interval]()
    for event in events:
        if event.kind in kinds:
            spans.append((event.start, event.end))
        elif event.kind == WAIT and event.device.type == "cuda":
            waits.append((event.start, event.end))
    return length(union(spans + waits)) - length(union(waits))


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of the intervals; overlaps count twice."""
    return sum(end - start for start, end in intervals)
