"""Plans a run: its actions and their order, as data. Nothing here runs anything.

A plan lays the actions out in *ticks*, as if all took the same time. What matters is their order:
the clock posts tick by tick, and a worker starts an action the moment its input arrives. So a plan
is correct, and nobody waits for ever, if these rules hold:

1. Each action occurs once.
2. The actions that it needs, by ``action.RULES``, are in earlier ticks.
3. A worker has at most one action in a tick.
4. A partition does its ``F`` in the order of the previous partition, and its ``B`` in the order of
   the next: values go from one to the other in a queue.

A schedule makes the ticks: a pure function of *m*, *n* and the placement, which names the worker of
each partition. ``pipe(x)`` has the clock-cycle; a step has one of ``NAMED``, or one of the user's.

>>> print(plan("1f1b", 3, 2))
tick  0       1       2       3       4       5       6       7
w=0   F[0,0]  F[1,0]          B[0,0]  F[2,0]  B[1,0]          B[2,0]
w=1           F[0,1]  B[0,1]  F[1,1]  B[1,1]  F[2,1]  B[2,1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pipert.schedules.action import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    RULES,
    Action,
    Size,
    Ticks,
    lay_out,
)
from pipert.schedules.orders import (
    clock_cycle,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
)
from pipert.schedules.zero_bubble import (
    zero_bubble,
    zero_bubble_1,
    zero_bubble_2,
    zero_bubble_v,
)

Schedule = Callable[[int, int, tuple[int, ...]], Ticks]
"""Takes ``m``, ``n`` and the placement; returns ticks, with an ``R`` for each micro-batch."""

NAMED: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "interleaved": interleaved,
    "zb": zero_bubble,
    "zb-h1": zero_bubble_1,
    "zb-h2": zero_bubble_2,
    "zb-v": zero_bubble_v,
}
BOUNDED = tuple([schedule for schedule in NAMED.values() if schedule is not gpipe])
"""The schedules that keep a bounded number of micro-batches, however large ``m`` is."""

Orders = tuple[tuple[Action, ...], ...]

CALL = (FORWARD,)
STEP = (FORWARD, RECOMPUTE, BACKWARD)


@dataclass(frozen=True)
class Plan:
    """The actions of one run, in ticks.

    Raises:
        ValueError: a rule is broken; the message names the first action that breaks it.
    """

    m: int
    """The number of micro-batches."""
    n: int
    """The number of partitions."""
    placement: tuple[int, ...]
    """The worker of each partition."""
    recomputed: tuple[int, ...]
    """For each partition, the number of micro-batches, from the first, that are recomputed: by an
    ``R`` in a step, by autograd in the backward of a call."""
    ticks: tuple[tuple[Action, ...], ...]
    kinds: tuple[str, ...] = STEP
    """The kinds of action that the plan must have. Of another that it has, it has all."""
    order: tuple[Action, ...] = field(init=False, repr=False, compare=False)
    """All actions, in the order in which the clock posts them."""
    positions: dict[Action, int] = field(init=False, repr=False, compare=False)
    """The position of each action in the order."""
    occurring_kinds: frozenset[str] = field(init=False, repr=False, compare=False)
    """The kinds of action that the plan has, including those that a schedule adds."""
    _sizes: tuple[Size, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # No ``cached_property``: it may take a lock, which a forked child may find held.
        order = tuple([action for tick in self.ticks for action in tick])
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "positions", {action: k for k, action in enumerate(order)})
        object.__setattr__(self, "occurring_kinds", frozenset([a.kind for a in order]))
        sizes = tuple([Size(self.m, self.n, recomputed) for recomputed in self.recomputed])
        object.__setattr__(self, "_sizes", sizes)
        self._check()

    def _check(self) -> None:
        done: set[Action] = set()
        for k, tick in enumerate(self.ticks):
            busy: dict[int, Action] = {}
            for action in tick:
                self._check_place(action, k, done, busy)
                missing = [needed for needed in self.needs(action) if needed not in done]
                if missing:
                    raise ValueError(f"{action} is in tick {k} and needs {missing[0]} before it")
            done.update(tick)
        for kind in dict.fromkeys((*self.kinds, *sorted(self.occurring_kinds))):
            for j in range(self.n):
                for i in range(RULES[kind].count(self._sizes[j])):
                    if Action(kind, i, j) not in done:
                        raise ValueError(
                            f"a schedule has each action once, but {Action(kind, i, j)} is not in "
                            "it"
                        )
        for kind in (FORWARD, BACKWARD):
            first, *others = [
                [a.i for a in self.order if a.kind == kind and a.j == j] for j in range(self.n)
            ]
            for j, other in enumerate(others, start=1):
                if other != first:
                    raise ValueError(
                        f"all partitions do {kind} of the micro-batches in the same order, but "
                        f"partition 0 in {first} and partition {j} in {other}"
                    )

    def _check_place(
        self, action: Action, k: int, done: set[Action], busy: dict[int, Action]
    ) -> None:
        kind, i, j = action
        is_known = kind in RULES and 0 <= j < self.n
        if not (is_known and 0 <= i < RULES[kind].count(self._sizes[j])):
            raise ValueError(
                f"{action} in tick {k} is no action of {self.m} micro-batches, {self.recomputed} "
                f"of them recomputed, and {self.n} partitions"
            )
        other = busy.get(self.placement[j])
        if action in done or action == other:
            raise ValueError(f"a schedule has each action once, but {action} is in it twice")
        if other is not None:
            raise ValueError(f"a worker does one action in a tick; tick {k} has {other}, {action}")
        busy[self.placement[j]] = action

    def needs(self, action: Action) -> Iterable[Action]:
        """Return the actions that must be done before ``action`` (rule 2)."""
        return RULES[action.kind].needs(action, self._sizes[action.j])

    @property
    def goes_back(self) -> bool:
        """Whether the backward is part of the plan, rather than left to autograd."""
        return BACKWARD in self.kinds

    def __iter__(self) -> Iterator[Action]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __str__(self) -> str:
        """Return a grid with a row for each worker and a column for each tick."""
        rows = [["tick", *map(str, range(len(self.ticks)))]]
        for worker in sorted(set(self.placement)):
            by_tick = [[a for a in tick if self.placement[a.j] == worker] for tick in self.ticks]
            rows.append([f"w={worker}", *("".join(map(str, actions)) for actions in by_tick)])
        columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, columns)).rstrip() for row in rows)


def plan(
    schedule: str | Schedule,
    m: int,
    n: int,
    placement: Sequence[int] | None = None,
    recomputed: int | Sequence[int] = 0,
) -> Plan:
    """Return the plan of a step, checked against the rules.

    >>> print(plan("1f1b", m=2, n=2))
    tick  0       1       2       3       4       5
    w=0   F[0,0]  F[1,0]          B[0,0]          B[1,0]
    w=1           F[0,1]  B[0,1]  F[1,1]  B[1,1]

    Args:
        schedule: ``'gpipe'``, ``'1f1b'``, ``'eager-1f1b'``, ``'interleaved'``, ``'zb'``,
            ``'zb-h1'``, ``'zb-h2'``, ``'zb-v'``, or a function from ``m``, ``n`` and the placement
            to ticks: lists of :class:`Action`, with ``F``, ``R`` and ``B`` of each micro-batch and
            partition, and every ``W`` or none. It is called for each plan; ticks that were planned
            before are not checked again. Names are case-insensitive.
        m: the number of micro-batches.
        n: the number of partitions.
        placement: the worker of each partition; by default each has its own.
        recomputed: the number of micro-batches, from the first, that are recomputed; or one for
            each partition. The ``R`` of the others are left out, and what comes after them moves
            up.

    Raises:
        ValueError: there is no schedule of that name, or it breaks a rule.
        TypeError: ``schedule`` is neither a name nor a function, or its result is not ticks.
    """
    maker = maker_of(schedule)
    placement = tuple(range(n) if placement is None else placement)
    each = _each(recomputed, n)
    if maker in NAMED.values():
        return _named(maker, m, n, placement, each, STEP)
    return _plan(_made(maker, m, n, placement), m, n, placement, each, STEP)


def recomputed(checkpoint: str, m: int) -> int:
    """Return how many of ``m`` micro-batches, counted from the first, are recomputed."""
    return {"always": m, "except_last": m - 1, "never": 0}[checkpoint]


def recomputed_in_each(checkpoint: str | Sequence[str], m: int, n: int) -> tuple[int, ...]:
    """Return the same for each of ``n`` partitions, given one mode or the mode of each."""
    modes = [checkpoint] * n if isinstance(checkpoint, str) else checkpoint
    return tuple([recomputed(mode, m) for mode in modes])


def _each(recomputed: int | Sequence[int], n: int) -> tuple[int, ...]:
    return (recomputed,) * n if isinstance(recomputed, int) else tuple(recomputed)


def maker_of(schedule: str | Schedule) -> Schedule:
    """Return the function that makes a schedule, which may be given by its name."""
    if isinstance(schedule, str):
        if schedule.lower() in NAMED:
            return NAMED[schedule.lower()]
        raise ValueError(
            f"schedule must be one of {list(NAMED)}, or a function that makes one, got "
            f"{schedule!r}"
        )
    if not callable(schedule):
        raise TypeError(f"schedule must be a name or a function that makes one, got {schedule!r}")
    return schedule


def plan_call(
    m: int, n: int, placement: Sequence[int], recomputed: int | Sequence[int] = 0
) -> Plan:
    """Plan a call: the clock-cycle, whose backward is left to autograd."""
    return _named(clock_cycle, m, n, tuple(placement), _each(recomputed, n), CALL)


def _made(maker: Schedule, m: int, n: int, placement: tuple[int, ...]) -> Orders:
    """Return the ticks that ``maker`` makes. Its own exceptions pass unchanged."""
    _check_size(m, n)
    return tuple([tuple([Action(*action) for action in tick]) for tick in maker(m, n, placement)])


def _check_size(m: int, n: int, recomputed: tuple[int, ...] = ()) -> None:
    if m < 1 or n < 1:
        raise ValueError(f"m and n must be positive, got m={m}, n={n}")
    if not all(0 <= each <= m for each in recomputed):
        raise ValueError(f"from 0 to m={m} micro-batches are recomputed, got {recomputed}")


@lru_cache(maxsize=64)
def _named(
    maker: Schedule,
    m: int,
    n: int,
    placement: tuple[int, ...],
    recomputed: tuple[int, ...],
    kinds: tuple[str, ...],
) -> Plan:
    """Plan with a schedule of pipert's. A user's function is not cached: it may hold anything."""
    make = _plan.__wrapped__  # one cache is enough
    return make(_made(maker, m, n, placement), m, n, placement, recomputed, kinds)


@lru_cache(maxsize=64)
def _plan(
    ticks: Orders,
    m: int,
    n: int,
    placement: tuple[int, ...],
    recomputed: tuple[int, ...],
    kinds: tuple[str, ...],
) -> Plan:
    _check_size(m, n, recomputed)
    if RECOMPUTE not in kinds:
        return Plan(m, n, placement, recomputed, ticks, kinds)
    whole = Plan(m, n, placement, (m,) * n, ticks, kinds)  # checked before anything is left out
    if recomputed == whole.recomputed:
        return whole
    kept = [a for a in whole.order if a.kind != RECOMPUTE or a.i < recomputed[a.j]]
    workers = sorted(set(placement))
    orders = [[a for a in kept if placement[a.j] == worker] for worker in workers]
    sizes = [Size(m, n, each) for each in recomputed]
    kept_ticks = tuple([tuple(tick) for tick in lay_out(orders, workers, sizes)])
    return Plan(m, n, placement, recomputed, kept_ticks, kinds)
