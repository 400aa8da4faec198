"""Fits a schedule to the measured times of a pipe, by trying orders in a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from pipert.observe.event import COPY
from pipert.observe.event import WEIGHT as PUT_OFF
from pipert.observe.event import Event
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action, Ticks
from pipert.schedules.greedy import greedy
from pipert.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from pipert.schedules.plan import Plan, Schedule, plan
from pipert.schedules.simulate import simulate
from pipert.schedules.zero_bubble import zero_bubble_1, zero_bubble_2
from pipert.timeline.report import Report

__all__ = ["Fitted", "Prediction"]

_NAMED = {
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "zb-h1": zero_bubble_1,
    "zb-h2": zero_bubble_2,
}


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a step under one schedule."""

    name: str
    """The name of the schedule; ``'fitted'`` for the one that was made."""
    seconds: float
    """The time from the first forward to the last gradient."""
    kept: tuple[float, ...]
    """The most micro-batches that each device keeps for their backward, in the order of the
    devices; of one with several partitions, their mean."""


@dataclass(frozen=True)
class _Times:
    """Measured medians, in seconds."""

    actions: tuple[Mapping[str, float], ...]
    """By partition and kind."""
    copies: Mapping[tuple[int, int], float]
    """By the partitions that they come from and go to."""

    def of(self, action: Action) -> float:
        return self.actions[action.j][action.kind]

    def with_recomputation(self, action: Action) -> float:
        recompute = self.actions[action.j][RECOMPUTE] if action.kind == BACKWARD else 0.0
        return self.of(action) + recompute

    def recomputed(self, m: int) -> tuple[int, ...]:
        return tuple([m if each[RECOMPUTE] else 0 for each in self.actions])

    def copying(self, j: int, to: int) -> float:
        return self.copies.get((j, to), 0.0)


class Fitted:
    """A schedule made for measured times; ``forward_backward(schedule=...)`` takes it.

    It is made anew for each number of micro-batches. ``print`` shows what it predicts.
    """

    def __init__(self, times: _Times, m: int, placement: tuple[int, ...], most: int | None) -> None:
        self._times, self._m, self._placement, self._most = times, m, placement, most
        self._make = lru_cache(maxsize=8)(self._make_plan)

    def __call__(self, m: int, n: int, placement: tuple[int, ...]) -> Ticks:
        """Return the ticks of a step.

        Raises:
            ValueError: the partitions are placed otherwise than in the recording.
        """
        if placement != self._placement:
            raise ValueError(
                f"the schedule was fitted to partitions on the workers {list(self._placement)}, "
                f"and these are on {list(placement)}; record a step of this pipe"
            )
        return self._make(m)[0]

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Predictions for as many micro-batches as were recorded: of this schedule, and of others.

        Those that keep more than is allowed are left out.
        """
        m = self._m
        plans = [("fitted", self._make(m)[1])]
        plans += [(name, self._plan(make, m)) for name, make in _NAMED.items()]
        found = [self._predict(name, made) for name, made in plans]
        return tuple([each for each in found if self._is_allowed(each)])

    def _make_plan(self, m: int) -> tuple[Ticks, Plan]:
        """Return the fastest ticks and plan; of equally fast ones, those which keep the least."""

        def cost(candidate: tuple[Ticks, Plan]) -> tuple[float, float]:
            found = self._predict("", candidate[1])
            return round(found.seconds, 9), sum(found.kept)

        return min(self._candidates(m), key=cost)

    def _candidates(self, m: int) -> Iterator[tuple[Ticks, Plan]]:
        """Yield orders by measured and by equal times, for each number of micro-batches kept."""
        placement, counts = self._placement, Counter(self._placement)
        most = self._most or 2 * len(counts) - 1
        for kept in range(1, min(m, most) + 1):
            room = {worker: kept * count for worker, count in counts.items()}
            for seconds, copying in (
                (self._times.with_recomputation, self._times.copying),
                (lambda _: 1.0, lambda *_: 0.25),
                (lambda _: 1.0, lambda *_: 0.0),
            ):
                ticks = [*map(tuple, greedy(m, placement, room, seconds, copying))]
                yield ticks, self._plan(lambda *_, ticks=ticks: ticks, m)

    def _plan(self, schedule: Schedule, m: int) -> Plan:
        recomputed = self._times.recomputed(m)
        return plan(schedule, m, len(self._placement), self._placement, recomputed)

    def _predict(self, name: str, made: Plan) -> Prediction:
        puts_off = WEIGHT in made.occurring_kinds

        def seconds(action: Action) -> float:
            whole = action.kind == BACKWARD and not puts_off
            put_off = self._times.of(Action(WEIGHT, action.i, action.j)) if whole else 0.0
            return self._times.of(action) + put_off

        times = simulate(made, seconds, self._times.copying)
        counts = Counter(self._placement)
        kept = _kept(made, WEIGHT if puts_off else BACKWARD)
        each = tuple([kept[worker] / counts[worker] for worker in sorted(counts)])
        return Prediction(name, max(end for _, end in times.values()), each)

    def _is_allowed(self, found: Prediction) -> bool:
        return self._most is None or max(found.kept) <= self._most

    def __str__(self) -> str:
        lines = ["predicted    ms a step  micro-batches that each device keeps"]
        for each in self.predictions:
            kept = ", ".join(f"{count:g}" for count in each.kept)
            lines.append(f"{each.name:<12}{1e3 * each.seconds:>10.3f}  {kept}")
        return "\n".join(lines)


def _kept(made: Plan, last: str) -> Counter[int]:
    """Count the most micro-batches that each worker keeps, once for each of its partitions."""
    now, most = Counter[int](), Counter[int]()
    for action in made.order:
        worker = made.placement[action.j]
        now[worker] += (action.kind == FORWARD) - (action.kind == last)
        most[worker] = max(most[worker], now[worker])
    return most


def fit(
    events: Sequence[Event], report: Report, placement: tuple[int, ...], memory: int | None
) -> Fitted:
    """Make a schedule, see :meth:`Timeline.fit`."""
    if memory is not None and memory < 1:
        raise ValueError(f"memory is a number of micro-batches, and at least 1, got {memory}")
    if not any(event.kind == PUT_OFF for event in events):
        raise ValueError(
            "the timeline has no gradients of weights that were put off; record steps of "
            "forward_backward(schedule='zb-h1')"
        )
    actions = tuple([
        {FORWARD: cost.forward, RECOMPUTE: cost.recompute, BACKWARD: cost.backward,
         WEIGHT: cost.weight}
        for cost in report.costs
    ])  # fmt: skip
    copies: dict[tuple[int, int], list[float]] = {}
    for event in events:
        if event.kind == COPY and event.origin is not None and event.origin != event.partition:
            copies.setdefault((event.origin, event.partition), []).append(event.seconds)
    times = _Times(actions, {pair: median(seconds) for pair, seconds in copies.items()})
    return Fitted(times, report.micro_batches, placement, memory)
