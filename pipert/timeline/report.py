"""Reports how the devices spent their time, and how to use it better.

The pipe is at work from the first to the last forward task of each call, and from the first to the
last task of its backward. The training loop's work in between (loss, optimizer, data) is counted
separately, as time outside. Advice names what holds the pipe back; ``plan_for`` predicts what would
be faster.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from textwrap import wrap

import torch

from pipert.observe.event import BACKWARD, COMPUTE, COPY, FORWARD, RECOMPUTE, WAIT, WEIGHT, Event

__all__ = ["Advice", "Costs", "DeviceTimes", "Report"]

_COLUMNS = 100  # the width of the text
_MUCH = 0.05  # smaller shares are within the noise of the measurements
_MUCH_OUTSIDE = 0.3
_SHORT = 300e-6  # s; such a task takes little longer than the overhead of running it


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of a micro-batch in one partition, in seconds: the medians of its tasks."""

    forward: float
    recompute: float
    """Spread over all micro-batches, including those that are not recomputed."""
    backward: float
    weight: float = 0.0
    """Deferred gradients of weights."""

    @property
    def whole(self) -> float:
        """The sum of all four."""
        return self.forward + self.recompute + self.backward + self.weight


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that holds the pipe back, and what may help."""

    kind: str
    """``'outside'``, ``'cores'``, ``'balance'``, ``'short tasks'``, ``'plan'`` or ``'chunks'``."""
    text: str


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
    for_input: float
    """The part of ``waiting`` known to be a wait for an input or its copy."""
    copying: float
    """Incoming copies."""
    hidden: float
    """The part of ``copying`` that overlaps with computing."""


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
    """The share of the devices' time in which they did not compute, from 0 to 1."""
    forward_bubble: float | None
    """The bubble while calls run forward; ``None`` for steps of ``forward_backward``, where forward
    and backward interleave."""
    backward_bubble: float | None
    """The bubble while calls run backward; ``None`` likewise, or if there was no backward."""
    ideal_bubble: float
    """The :attr:`bubble` of equal partitions with free copies: ``(n-1)/(m+n-1)`` (section 2.1 of
    the paper); more for CPU partitions, whose backward runs in one thread; less with deferred
    gradients of weights."""
    costs: tuple[Costs, ...]
    """The cost of a micro-batch in each partition."""
    advice: tuple[Advice, ...]
    """What holds the pipe back, and what may help."""

    def __str__(self) -> str:
        lines = [*wrap(_headline(self), _COLUMNS), "", *_table(self), "", _bubble_line(self)]
        for advice in self.advice:
            lines += wrap(f"* {advice.text}", _COLUMNS, subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__


def make_report(
    events: Sequence[Event],
    lanes: Sequence[str],
    workers: Sequence[int],
    devices: Sequence[torch.device],
    steps: frozenset[int],
    failed: frozenset[int],
) -> Report:
    """Makes the result of :meth:`Timeline.report`."""
    sizes, incomplete = _calls(events, len(devices), steps, failed)
    events = [event for event in events if event.run in sizes]
    if not events:
        lost = f", and {len(incomplete)} that failed or were cut off" * bool(incomplete)
        raise ValueError(
            f"there is no complete call in this timeline{lost}; call the pipe inside 'with "
            "pipe.record() as timeline', and its backward, too"
        )
    # Forward and backward of a step interleave, so both phases are the whole step.
    stepped = steps.issuperset(sizes)
    forward = _phases(events, COMPUTE if stepped else (FORWARD,))
    backward = _phases(events, COMPUTE if stepped else (RECOMPUTE, BACKWARD, WEIGHT))
    work = union([*forward, *backward])
    m, n = int(median_low(sizes.values())), len(lanes)
    seconds = max(event.end for event in events) - min(event.start for event in events)
    lane_events = [[e for e in events if workers[e.partition] == lane] for lane in range(n)]
    busy = [times_of(on_lane, COMPUTE) for on_lane in lane_events]
    costs = _costs(events, len(devices))
    forward_share = length(union(forward)) / (length(work) or 1.0)
    one_thread = not stepped and all(device.type == "cpu" for device in devices)
    ideal = _ideal_bubble(m, n, costs)
    ideal_backward = (n - 1) / n if one_thread else ideal
    report = Report(
        calls=len(sizes),
        incomplete=len(incomplete),
        micro_batches=m,
        seconds=seconds,
        outside=max(0.0, seconds - length(work)),
        devices=tuple(_device(*lane, work) for lane in zip(lanes, lane_events, strict=True)),
        bubble=_bubble(busy, work),
        forward_bubble=None if stepped else _bubble(busy, union(forward)),
        backward_bubble=None if stepped or not backward else _bubble(busy, union(backward)),
        ideal_bubble=forward_share * ideal + (1 - forward_share) * ideal_backward,
        costs=costs,
        advice=(),
    )
    return replace(report, advice=tuple(_advice(report, workers, devices, one_thread)))


def _calls(
    events: Sequence[Event], n: int, steps: frozenset[int], failed: frozenset[int]
) -> tuple[dict[int, int], set[int]]:
    """Returns the number of micro-batches of each complete call, and the incomplete calls.

    A complete call has not failed and has all its forward tasks. A complete step also has each
    micro-batch's backward, as far down as there is something to differentiate.
    """
    forward: dict[int, set[tuple[int, int]]] = {}
    for event in events:
        if event.kind == FORWARD:
            forward.setdefault(event.run, set()).add((event.micro_batch, event.partition))
    sizes = {run: 1 + max(i for i, _ in tasks) for run, tasks in forward.items()}
    backward = {(event.run, event.micro_batch) for event in events if event.kind == BACKWARD}
    complete = {
        run: m
        for run, m in sizes.items()
        if run not in failed
        and len(forward[run]) == m * n
        and (run not in steps or all((run, i) in backward for i in range(m)))
    }
    return complete, {event.run for event in events} - set(complete)


def _phases(events: Sequence[Event], kinds: Collection[str]) -> list[Interval]:
    """Returns the times at which each call was at work on tasks of ``kinds``.

    These do not simply last from its first to its last task, since a call may run backward twice,
    with a pause in between: a gap longer than any task.
    """
    phases: list[Interval] = []
    runs: dict[int, list[Interval]] = {}
    for event in events:
        if event.kind in kinds:
            runs.setdefault(event.run, []).append((event.start, event.end))
    for tasks in runs.values():
        phases += union(tasks, gap=max(end - start for start, end in tasks))
    return phases


def _device(name: str, events: Sequence[Event], work: list[Interval]) -> DeviceTimes:
    busy, forward, recomputing, first, copying, waiting = (
        times_of(events, kinds)
        for kinds in (COMPUTE, {FORWARD}, {RECOMPUTE}, {FORWARD, RECOMPUTE}, {COPY}, {WAIT})
    )
    waited = overlap(waiting, work)
    return DeviceTimes(
        name=name,
        busy=length(busy),
        forward=length(forward),
        recomputing=length(recomputing),
        backward=length(busy) - length(first),  # a recomputation may be inside a backward
        waiting=length(work) - length(overlap(busy, work)),
        for_input=length(waited) - length(overlap(waited, busy)),
        copying=length(copying),
        hidden=length(overlap(copying, busy)),
    )


def _bubble(busy: Sequence[list[Interval]], work: list[Interval]) -> float:
    """Returns the share of the devices' time in ``work`` in which they did not compute."""
    total = len(busy) * length(work)
    return 1 - sum(length(overlap(times, work)) for times in busy) / total if total else 0.0


def _costs(events: Sequence[Event], n: int) -> tuple[Costs, ...]:
    """Returns each partition's cost of a micro-batch: medians, which few delayed tasks change."""
    seconds: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for event in events:
        if event.kind in COMPUTE:  # a backward may be in several pieces
            by_task = seconds.setdefault((event.kind, event.partition), {})
            task = event.run, event.micro_batch
            by_task[task] = by_task.get(task, 0.0) + event.seconds
    costs = []
    for j in range(n):
        by_kind = [list(seconds.get((kind, j), {}).values()) for kind in COMPUTE]
        forward, recompute, backward, weight = (median(times or [0.0]) for times in by_kind)
        share = len(by_kind[1]) / max(1, len(by_kind[0]))
        costs.append(Costs(forward, share * recompute, backward, weight))
    return tuple(costs)


def _ideal_bubble(m: int, n: int, costs: Sequence[Costs]) -> float:
    """Returns the bubble that ``n`` devices with equal partitions and free copies would have.

    The last device waits for its first input, and the first one for the last gradient, unless what
    was put off fills that time.
    """
    if not any(cost.weight for cost in costs):
        return (n - 1) / (m + n - 1)
    forward = sum(cost.forward for cost in costs) / len(costs)
    weight = sum(cost.weight for cost in costs) / len(costs)
    backward = sum(cost.whole for cost in costs) / len(costs) - forward - weight
    each = m * len(costs) / n  # the micro-batches of each device, counted once per partition
    idle = (n - 1) * forward + max(0.0, (n - 1) * backward - (each - 1) * weight)
    return idle / (idle + each * (forward + backward + weight))


def _advice(
    report: Report, workers: Sequence[int], devices: Sequence[torch.device], one_thread: bool
) -> Iterator[Advice]:
    """Yields what is worth a change; ``one_thread`` runs the backward of all partitions."""
    m, n, lanes, costs = report.micro_batches, len(devices), report.devices, report.costs
    work = report.seconds - report.outside
    if report.outside > _MUCH_OUTSIDE * report.seconds:
        yield Advice("outside", f"{_percent(report.outside, report.seconds)}% of the time the pipe "
                     "was not at work: look at the loss, the optimizer and the data")  # fmt: skip
    cores, cpus = os.cpu_count() or 1, sum(device.type == "cpu" for device in devices)
    if cpus == n and len(lanes) > cores:
        yield Advice("cores", f"{len(lanes)} CPU workers share {_count(cores, 'core')}: as many "
                     "partitions as cores may be faster, or more cores")  # fmt: skip
        return
    shortest = min(cost.forward for cost in costs)
    if not shortest > 0:
        return  # a partition has not run
    # Only the work that partitions do concurrently: on CPU the forward. Nothing can be moved
    # between partitions on one device, and devices of different types are not compared.
    sizes = [cost.forward if one_thread else cost.whole for cost in costs]
    slowest, ratio = sizes.index(max(sizes)), max(sizes) * n / sum(sizes)
    if n > 1 and len(lanes) == n and cpus in (0, n) and ratio >= 1 + _MUCH:
        where = " in the forward" if one_thread else ""
        yield Advice("balance", f"partition {slowest} on {lanes[workers[slowest]].name} is the "
                     f"slowest{where}: {1e3 * sizes[slowest]:.2f} ms for a micro-batch, "
                     f"{ratio:.2f} of the mean")  # fmt: skip
    if shortest < _SHORT and (m > 1 or n > 1):
        fewer = "fewer chunks" if m > 1 else "fewer partitions"
        yield Advice("short tasks", f"forward tasks take as little as {1e6 * shortest:.0f} us, "
                     f"and running one costs the interpreter 50 to 200: {fewer} may be "
                     "faster")  # fmt: skip
    recomputing = sum(each.recomputing for each in lanes) / (len(lanes) * work or 1.0)
    if max(report.bubble, recomputing) >= _MUCH:
        yield Advice("plan", f"devices waited for {100 * report.bubble:.0f}% of their time and "
                     f"recomputed for {100 * recomputing:.0f}%: pipert.plan_for searches the "
                     "balance, chunks, schedule and checkpoint of the fastest step that fits the "
                     "memory")  # fmt: skip


def _headline(report: Report) -> str:
    left_out = f" ({report.incomplete} incomplete left out)" if report.incomplete else ""
    return (
        f"{_count(report.calls, 'call')} of {_count(report.micro_batches, 'micro-batch', 'es')} on "
        f"{_count(len(report.devices), 'device')} in {report.seconds:.3f} s{left_out}. The pipe "
        f"was at work for {100 - _percent(report.outside, report.seconds)}% of that, and in this "
        "time each device was"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _table(report: Report) -> Iterator[str]:
    columns = ("busy", "forward", "recomputing", "backward", "waiting", "for input", "copying")
    width = max(len(times.name) for times in report.devices)
    cell = min(13, max(12, (_COLUMNS - width) // len(columns)))
    yield " " * width + "".join(f"{column:>{cell}}" for column in columns)
    work = report.seconds - report.outside
    for times in report.devices:
        parts = [getattr(times, column.replace(" ", "_")) for column in columns]
        shares = "".join(f"{_percent(part, work):>{cell - 1}}%" for part in parts)
        yield f"{times.name:<{width}}{shares}"


def _bubble_line(report: Report) -> str:
    phases = (("forward", report.forward_bubble), ("backward", report.backward_bubble))
    parts = [f"{name} {100 * share:.0f}%" for name, share in phases if share is not None]
    by_phase = f" ({', '.join(parts)})" if parts else ""
    return (
        f"Bubble: {100 * report.bubble:.0f}% of the devices' time{by_phase}; "
        f"equal partitions would leave {100 * report.ideal_bubble:.0f}%."
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


def times_of(events: Iterable[Event], kinds: Collection[str]) -> list[Interval]:
    """Returns the times at which there was an event of one of these kinds."""
    return union((event.start, event.end) for event in events if event.kind in kinds)


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of the intervals; overlaps count twice."""
    return sum(end - start for start, end in intervals)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Returns the time that both cover; each must be a result of :func:`union`."""
    common, a, b = [], 0, 0
    while a < len(one) and b < len(other):
        start, end = max(one[a][0], other[b][0]), min(one[a][1], other[b][1])
        if start < end:
            common.append((start, end))
        if one[a][1] < other[b][1]:
            a += 1
        else:
            b += 1
    return common
