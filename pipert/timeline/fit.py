"""Fits a schedule to the measured times of a pipe, by trying orders in a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pipert.model.settings import whole
from pipert.observe.event import COPY
from pipert.observe.event import WEIGHT as PUT_OFF
from pipert.observe.event import Event
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action, Ticks
from pipert.schedules.greedy import greedy
from pipert.schedules.plan import Plan, plan
from pipert.schedules.simulate import most_kept, simulate
from pipert.timeline.report import Report

__all__ = ["Fitted", "Prediction"]

_NAMED = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2")


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

    def copying(self, j: int, to: int) -> float:
        return self.copies.get((j, to), 0.0)


class Fitted:
    """A schedule made for measured times; ``forward_backward(schedule=...)`` takes it.

    It is made anew for each number of micro-batches, which takes about a second on eight devices.
    ``print`` shows what it predicts.
    """

    def __init__(self, times: _Times, m: int, placement: tuple[int, ...], most: int | None) -> None:
        self._times, self._m, self._placement, self._most = times, m, placement, most
        self._made: dict[int, tuple[Plan, Prediction]] = {}
        self._best(m)

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
        return self._best(m)[0].ticks

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Predictions for as many micro-batches as were recorded: of this schedule, and of others.

        Those that keep more than is allowed are left out.
        """
        return (self._best(self._m)[1], *[found for _, found in self._named(self._m)])

    def _best(self, m: int) -> tuple[Plan, Prediction]:
        """Return the fastest plan; of equally fast ones, that which keeps the least."""
        if m not in self._made:
            tried = [*self._fitted(m), *self._named(m)]
            best = min(tried, key=lambda pair: (round(pair[1].seconds, 9), sum(pair[1].kept)))
            self._made[m] = best[0], replace(best[1], name="fitted")
        return self._made[m]

    def _fitted(self, m: int) -> Iterator[tuple[Plan, Prediction]]:
        """Yield plans by measured and by equal times, for each number of micro-batches kept."""
        placement, counts = self._placement, Counter(self._placement)
        most = self._most or 2 * len(counts) - 1
        measured = self._times.with_recomputation, self._times.copying
        for seconds, copying in measured, (lambda _: 1.0, lambda *_: 0.0):
            before: object = None
            for kept in range(1, min(m, most) + 1):
                room = {worker: kept * count for worker, count in counts.items()}
                ticks = greedy(m, placement, room, seconds, copying)
                if ticks == before:  # nor do more help
                    break
                before = ticks
                made = Plan(
                    m, len(placement), placement, (m,) * len(placement), tuple(map(tuple, ticks))
                )
                yield made, self._predict("fitted", made)

    def _named(self, m: int) -> Iterator[tuple[Plan, Prediction]]:
        """Yield the named schedules that keep no more than is allowed."""
        n = len(self._placement)
        for name in _NAMED:
            made = plan(name, m, n, self._placement, m)
            found = self._predict(name, made)
            if self._most is None or max(found.kept) <= self._most:
                yield made, found

    def _predict(self, name: str, made: Plan) -> Prediction:
        puts_off = WEIGHT in made.occurring_kinds

        def seconds(action: Action) -> float:
            whole = action.kind == BACKWARD and not puts_off
            put_off = self._times.of(Action(WEIGHT, action.i, action.j)) if whole else 0.0
            return self._times.of(action) + put_off

        times = simulate(made, seconds, self._times.copying)
        counts = Counter(self._placement)
        kept = most_kept(made, made.placement)
        each = tuple([kept[worker] / counts[worker] for worker in sorted(counts)])
        return Prediction(name, max(end for _, end in times.values()), each)

    def __str__(self) -> str:
        lines = ["predicted    ms a step  micro-batches that each device keeps"]
        for each in self.predictions:
            kept = ", ".join(f"{count:g}" for count in each.kept)
            lines.append(f"{each.name:<12}{1e3 * each.seconds:>10.3f}  {kept}")
        return "\n".join(lines)


def fit(
    events: Sequence[Event],
    report_on: Callable[[Sequence[Event]], Report],
    placement: tuple[int, ...],
    memory: int | None,
) -> Fitted:
    """Make a schedule, see :meth:`Timeline.fit`."""
    most = None if memory is None else whole(memory, "memory")
    if most is not None and most < 1:
        raise ValueError(f"memory is a number of micro-batches, and at least 1, got {memory}")
    runs = {event.run for event in events if event.kind == PUT_OFF}
    used = [event for event in events if event.run in runs]
    if not used:
        raise ValueError(
            "the timeline has no gradients of weights that were put off; record steps of "
            "forward_backward(schedule='zb-h1')"
        )
    report = report_on(used)
    actions = tuple([
        {FORWARD: cost.forward, RECOMPUTE: cost.recompute, BACKWARD: cost.backward,
         WEIGHT: cost.weight}
        for cost in report.costs
    ])  # fmt: skip
    copies: dict[tuple[int, int], list[float]] = {}
    for event in used:
        if event.kind == COPY and event.origin is not None and event.origin != event.partition:
            copies.setdefault((event.origin, event.partition), []).append(event.seconds)
    times = _Times(actions, {pair: median(seconds) for pair, seconds in copies.items()})
    return Fitted(times, report.micro_batches, placement, most)
