"""Reports how the devices spent their time, and how to use it better.

Time counts while the pipe is at work: from the first to the last forward task of each call, and
from the first to the last task of its backward. Work of the training loop in between (loss,
optimizer, data) is counted separately.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from textwrap import wrap

import torch

from pipert.seeing.event import BACKWARD, COMPUTE, COPY, FORWARD, RECOMPUTE, WAIT, Event
from pipert.timeline.advice import Advice, Costs, Seen, advise
from pipert.timeline.intervals import Interval, length, overlap, times_of, union

__all__ = ["DeviceTimes", "Report"]

_COLUMNS = 100  # of the text


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """How one device spent its time, in seconds."""

    name: str
    busy: float
    """Computing: forward, recomputation or backward."""
    forward: float
    recomputing: float
    backward: float
    waiting: float
    """Not computing while the pipe was at work: waiting for input or the caller, or idle."""
    for_input: float
    """The part of it known to be a wait for an input or its copy."""
    copying: float
    """Incoming copies."""
    hidden: float
    """The part of ``copying`` that overlaps with computing."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of :meth:`Timeline.report`: figures, and as ``str`` the text."""

    calls: int
    """Complete calls: failed or unfinished ones do not count."""
    incomplete: int
    """Incomplete calls, which are left out."""
    micro_batches: int
    """The usual number per call."""
    seconds: float
    """The time from the first event to the last."""
    outside: float
    """The part of ``seconds`` when the pipe was not at work."""
    devices: tuple[DeviceTimes, ...]
    waits: tuple[tuple[str, str, float], ...]
    """Of ranks: one, another, and the seconds for which the first waited for it, longest first."""
    bubble: float
    """The share of the devices' time in which they did not compute, from 0 to 1."""
    forward_bubble: float | None
    """``None`` for steps of ``forward_backward``, where forward and backward interleave."""
    backward_bubble: float | None
    """``None`` likewise, or if there was no backward."""
    ideal_bubble: float
    """The :attr:`bubble` of equal partitions and free copies: ``(n-1)/(m+n-1)``
    (section 2.1 of the paper); more for CPU partitions, whose backward runs in one thread."""
    costs: tuple[Costs, ...]
    """The cost of a micro-batch in each partition."""
    advice: tuple[Advice, ...]
    """Suggestions, largest predicted gain first."""

    def __str__(self) -> str:
        lines = [*wrap(_headline(self), _COLUMNS), "", *_table(self), "", _bubble_line(self)]
        lines += wrap(_waits_line(self), _COLUMNS)
        for one in self.advice:
            lines += wrap(f"* {one.text}", _COLUMNS, subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__


def make_report(
    events: Sequence[Event],
    lanes: Sequence[str],
    workers: Sequence[int],
    devices: Sequence[torch.device],
    layers: Sequence[Sequence[float]] | None,
    chunks: int | None,
    steps: frozenset[int],
    failed: frozenset[int],
    cores: int,
) -> Report:
    """See :meth:`Timeline.report`."""
    sizes, broken = _calls(events, len(devices), steps, failed)
    events = [event for event in events if event.run in sizes]
    if not events:
        raise ValueError(
            f"there is no complete call in this timeline, and {len(broken)} that failed or were "
            "cut off; call the pipe inside 'with pipe.record() as timeline'"
        )
    # In a step both run at once.
    stepped = steps.issuperset(sizes)
    kinds: tuple[tuple[str, ...], ...] = (FORWARD,), (RECOMPUTE, BACKWARD)
    forward, backward = (_phases(events, COMPUTE if stepped else of) for of in kinds)
    work = union([*forward, *backward])
    m, n = int(median_low(sizes.values())), len(lanes)
    seconds = max(event.end for event in events) - min(event.start for event in events)
    of_lanes = [[event for event in events if workers[event.j] == lane] for lane in range(n)]
    busy = [times_of(of_lane, COMPUTE) for of_lane in of_lanes]
    costs = _costs(events, len(devices))
    outside = max(0.0, seconds - length(work))
    share = outside / seconds if seconds else 0.0
    of_forward = length(union(forward)) / (length(work) or 1.0)
    one_thread = not stepped and all(device.type == "cpu" for device in devices)
    back = (n - 1) / n if one_thread else (n - 1) / (m + n - 1)
    seen = Seen(m, chunks, costs, lanes, workers, devices, layers, share, one_thread, cores)
    return Report(
        calls=len(sizes),
        incomplete=len(broken),
        micro_batches=m,
        seconds=seconds,
        outside=outside,
        devices=tuple(_device(*lane, work) for lane in zip(lanes, of_lanes, strict=True)),
        waits=_waits(events, lanes, workers, work),
        bubble=_bubble(busy, work),
        forward_bubble=None if stepped else _bubble(busy, union(forward)),
        backward_bubble=None if stepped or not backward else _bubble(busy, union(backward)),
        ideal_bubble=of_forward * (n - 1) / (m + n - 1) + (1 - of_forward) * back,
        costs=costs,
        advice=advise(seen),
    )


def _calls(
    events: Sequence[Event], n: int, steps: frozenset[int], failed: frozenset[int]
) -> tuple[dict[int, int], set[int]]:
    """Returns the micro-batches of each complete call, and the incomplete calls.

    A complete call has not failed and has all its forward tasks; a complete step also their
    backwards, as far down as there is something to differentiate.
    """
    forward: dict[int, set[tuple[int, int]]] = {}
    for event in events:
        if event.kind == FORWARD:
            forward.setdefault(event.run, set()).add((event.i, event.j))
    sizes = {run: 1 + max(i for i, _ in tasks) for run, tasks in forward.items()}
    back = {(event.run, event.i) for event in events if event.kind == BACKWARD}
    whole = {
        run: m
        for run, m in sizes.items()
        if run not in failed
        and len(forward[run]) == m * n
        and (run not in steps or all((run, i) in back for i in range(m)))
    }
    return whole, {event.run for event in events} - set(whole)


def _phases(events: Sequence[Event], kinds: Collection[str]) -> list[Interval]:
    """Returns when each call was at work, forward or backward.

    Not from the first to the last task: a call may run backward twice, with a pause
    in between. A pause is a gap longer than any task.
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


def _waits(
    events: Sequence[Event], lanes: Sequence[str], workers: Sequence[int], work: list[Interval]
) -> tuple[tuple[str, str, float], ...]:
    """Returns how long lanes waited for others, where that is known."""
    times: dict[tuple[str, str], list[Interval]] = {}
    for event in events:
        if event.kind == WAIT and event.origin is not None:
            who, awaited = lanes[workers[event.j]], lanes[workers[event.origin]]
            times.setdefault((who, awaited), []).append((event.start, event.end))
    found = [(*pair, length(overlap(union(of), work))) for pair, of in times.items()]
    return tuple(sorted(found, key=lambda one: -one[2]))


def _bubble(busy: Sequence[list[Interval]], work: list[Interval]) -> float:
    """Returns the share of the devices' time in ``work`` in which they did not compute."""
    whole = len(busy) * length(work)
    return 1 - sum(length(overlap(one, work)) for one in busy) / whole if whole else 0.0


def _costs(events: Sequence[Event], n: int) -> tuple[Costs, ...]:
    """Returns the usual cost of a micro-batch in each partition; delayed tasks do not affect it."""
    seconds: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for event in events:
        if event.kind in COMPUTE:  # a backward may be in several pieces
            of_partition = seconds.setdefault((event.kind, event.j), {})
            task = event.run, event.i
            of_partition[task] = of_partition.get(task, 0.0) + event.seconds
    costs = []
    for j in range(n):
        of_kinds = [list(seconds.get((kind, j), {}).values()) for kind in COMPUTE]
        forward, recompute, backward = (median(of or [0.0]) for of in of_kinds)
        share = len(of_kinds[1]) / max(1, len(of_kinds[0]))
        costs.append(Costs(forward, share * recompute, backward))
    return tuple(costs)


def _headline(report: Report) -> str:
    calls, left_out = _count(report.calls, "call"), ""
    if report.incomplete:
        left_out = f" ({_count(report.incomplete, 'incomplete call')} left out)"
    return (
        f"{calls} of {_count(report.micro_batches, 'micro-batch', 'es')} on "
        f"{_count(len(report.devices), 'device')} in {report.seconds:.3f} s{left_out}. The pipe "
        f"was at work for {100 - _percent(report.outside, report.seconds)}% of that, and in this "
        "time each device was"
    )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"


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
    apart = f" ({', '.join(parts)})" if parts else ""
    return (
        f"Bubble: {100 * report.bubble:.0f}% of the devices' time{apart}; "
        f"equal partitions would leave {100 * report.ideal_bubble:.0f}%."
    )


def _waits_line(report: Report) -> str:
    work = report.seconds - report.outside
    shares = [(who, awaited, _percent(time, work)) for who, awaited, time in report.waits]
    said = [f"{who} for {awaited} {share}%" for who, awaited, share in shares if share]
    return f"Waits: {', '.join(said)} of the time." if said else ""


def _percent(part: float, whole: float) -> int:
    return round(100 * part / whole) if whole > 0 else 0
