"""Schedules of a whole training step as data: nothing here runs anything.

A step has a forward ``F[i,j]`` and a backward ``B[i,j]`` for each micro-batch *i* and partition
*j*, and a recomputation ``R[i,j]`` where activations were not kept. A schedule lays them out in
*ticks*, as if all took as long. What counts is the order: the clock posts tick by tick, and a
worker starts a task the moment its input is there. So a schedule is right, and nobody waits for
ever, if these hold:

1. Each action is there once.
2. What it needs stands in an earlier tick. ``F[i,j]`` needs ``F[i,j-1]``. ``R[i,j]`` needs
   ``F[i,j]``. ``B[i,j]`` needs ``F[i,j]``, ``R[i,j]`` if there is one, and ``B[i,j+1]``.
3. A worker has one action in a tick.
4. A partition does its ``F`` in the order in which the one before does them, and its ``B`` in the
   order of the one behind: values go from one to the other in a queue.

A schedule is made by a pure function of *m*, *n* and the placement, which names the worker of each
partition: :func:`gpipe`, :func:`one_f_one_b`, :func:`eager_one_f_one_b`, or one of yours.

>>> print(plan("1f1b", 3, 2))
tick  0       1       2       3       4       5       6       7
w=0   F[0,0]  F[1,0]          B[0,0]  F[2,0]  B[1,0]          B[2,0]
w=1           F[0,1]  B[0,1]  F[1,1]  B[1,1]  F[2,1]  B[2,1]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from pipert.schedules.clock_cycle import Schedule
from pipert.status import task_name

__all__ = ["Action", "StepSchedule", "eager_one_f_one_b", "gpipe", "one_f_one_b", "plan"]

FORWARD, RECOMPUTE, BACKWARD = "F", "R", "B"


class Action(NamedTuple):
    """One task of a step."""

    kind: str
    """``'F'``, ``'R'`` or ``'B'``."""
    i: int
    """The micro-batch."""
    j: int
    """The partition."""

    def __str__(self) -> str:
        return task_name(self.kind, self.i, self.j)


Ticks = Iterable[Iterable[Action]]
Maker = Callable[[int, int, tuple[int, ...]], Ticks]
"""From ``m``, ``n`` and the placement to ticks, with an ``R`` for each micro-batch."""


@dataclass(frozen=True)
class StepSchedule:
    """The actions of a step in ticks.

    Raises:
        ValueError: a rule is broken; the message names the first action that does.
    """

    m: int
    n: int
    placement: tuple[int, ...]
    """The worker of each partition."""
    recomputed: int
    """How many micro-batches, from the first, are recomputed."""
    ticks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        done: set[Action] = set()
        for k, tick in enumerate(self.ticks):
            busy: dict[int, Action] = {}
            for action in tick:
                self._check_place(action, k, done, busy)
                missing = [needed for needed in self.needs(action) if needed not in done]
                if missing:
                    raise ValueError(f"{action} is in tick {k} and needs {missing[0]} before it")
            done.update(tick)
        lacking = [action for action in self._all() if action not in done]
        if lacking:
            raise ValueError(f"a schedule has each action once, but {lacking[0]} is not in it")
        for kind in (FORWARD, BACKWARD):
            first, *others = [self._of(kind, j) for j in range(self.n)]
            for j, other in enumerate(others, start=1):
                if other != first:
                    raise ValueError(
                        f"all partitions do {kind} of the micro-batches in the same order, but "
                        f"partition 0 in {first} and partition {j} in {other}"
                    )

    def _of(self, kind: str, j: int) -> list[int]:
        return [i for tick in self.ticks for k, i, of in tick if k == kind and of == j]

    def _all(self) -> Iterator[Action]:
        for kind, m in ((FORWARD, self.m), (RECOMPUTE, self.recomputed), (BACKWARD, self.m)):
            yield from (Action(kind, i, j) for i in range(m) for j in range(self.n))

    def _check_place(
        self, action: Action, k: int, done: set[Action], busy: dict[int, Action]
    ) -> None:
        kind, i, j = action
        limit = {FORWARD: self.m, RECOMPUTE: self.recomputed, BACKWARD: self.m}.get(kind, 0)
        if not (0 <= i < limit and 0 <= j < self.n):
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

    def needs(self, action: Action) -> Iterator[Action]:
        """What has to be done before it (rule 2)."""
        kind, i, j = action
        if kind == FORWARD:
            if j > 0:
                yield Action(FORWARD, i, j - 1)
            return
        yield Action(FORWARD, i, j)
        if kind == BACKWARD:
            if i < self.recomputed:
                yield Action(RECOMPUTE, i, j)
            if j < self.n - 1:
                yield Action(BACKWARD, i, j + 1)

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions as the clock posts them."""
        return tuple([action for tick in self.ticks for action in tick])

    @cached_property
    def _positions(self) -> dict[Action, int]:
        return {action: position for position, action in enumerate(self.order)}

    def position(self, action: Action) -> int:
        """Where in the order it is."""
        return self._positions[action]

    def task_at(self, position: int) -> Action:
        """The action at that place of the order."""
        return self.order[position]

    def __iter__(self) -> Iterator[Action]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __str__(self) -> str:
        """A row for each worker, a column for each tick."""
        rows = [["tick", *map(str, range(len(self.ticks)))]]
        for worker in sorted(set(self.placement)):
            by_tick = [[a for a in tick if self.placement[a.j] == worker] for tick in self.ticks]
            rows.append([f"w={worker}", *("".join(map(str, actions)) for actions in by_tick)])
        columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(map(str.ljust, row, columns)).rstrip() for row in rows
        )


def gpipe(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Fill and drain: all forwards, then all backwards, the last micro-batch first.

    The order of ``pipe(x)`` and ``loss.backward()`` (section 2.1 of the paper). Every partition
    keeps all micro-batches.
    """
    forward = [[Action(FORWARD, i, j) for i in range(m)] for j in range(n)]
    backward = [list(_back(reversed(range(m)), j)) for j in range(n)]
    return _lay_out([[*there, *back] for there, back in zip(forward, backward)], placement)


def one_f_one_b(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """One forward, one backward: a backward as soon as there is one to do.

    Partition *j* keeps ``min(m, n - j)`` micro-batches at most.
    """
    return _in_turns(m, [n - j for j in range(n)], placement)


def eager_one_f_one_b(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """One forward, one backward, with one micro-batch more on its way over each link.

    With :func:`one_f_one_b` a partition sends a gradient back, does one forward and one backward,
    and goes on with the input that came of the gradient. Until then the partition before has done
    as much, so in each turn both ways over the link are waited for. Here a partition has two of
    each to do in that time, and nobody waits as long as both ways take no longer than a forward and
    a backward (*eager 1F1B* in arXiv:2211.05322).

    Partition *j* keeps ``min(m, 2 * (n - j) - 1)`` micro-batches at most.
    """
    return _in_turns(m, [2 * (n - j) - 1 for j in range(n)], placement)


def _in_turns(m: int, most: Sequence[int], placement: tuple[int, ...]) -> Ticks:
    """Forward and backward in turns, after as many forwards as partition ``j`` keeps at most."""
    sequences = []
    for j, kept in enumerate(most):
        ahead = min(m, kept)
        sequence = [Action(FORWARD, i, j) for i in range(ahead)]
        for i in range(m):
            sequence += _back([i], j)
            if i + ahead < m:
                sequence.append(Action(FORWARD, i + ahead, j))
        sequences.append(sequence)
    return _lay_out(sequences, placement)


def _back(micro_batches: Iterable[int], j: int) -> Iterator[Action]:
    for i in micro_batches:
        yield Action(RECOMPUTE, i, j)
        yield Action(BACKWARD, i, j)


def _lay_out(sequences: Sequence[list[Action]], placement: Sequence[int]) -> Ticks:
    """Ticks in which each sequence is done in its order, as early as can be.

    ``placement`` is the worker of each. Of several a worker prefers the one that can go backward,
    which frees memory.
    """
    n, done = 1 + max(action.j for sequence in sequences for action in sequence), set[Action]()
    at = [0] * len(sequences)
    while any(at[s] < len(sequence) for s, sequence in enumerate(sequences)):
        tick: dict[int, tuple[Action, int]] = {}
        for s, sequence in enumerate(sequences):
            if at[s] < len(sequence) and _is_ready(sequence[at[s]], n, done):
                other = tick.get(placement[s])
                if other is None or _before(sequence[at[s]], other[0]):
                    tick[placement[s]] = sequence[at[s]], s
        assert tick, "the sequences wait for each other"
        for action, s in tick.values():
            at[s] += 1
            done.add(action)
        yield sorted((action for action, _ in tick.values()), key=lambda action: action.j)


def _is_ready(action: Action, n: int, done: set[Action]) -> bool:
    kind, i, j = action
    if kind == FORWARD:
        return j == 0 or Action(FORWARD, i, j - 1) in done
    return kind == RECOMPUTE or j == n - 1 or Action(BACKWARD, i, j + 1) in done


def _before(one: Action, other: Action) -> bool:
    return (one.kind == FORWARD, one.i) < (other.kind == FORWARD, other.i)


_NAMED: dict[str, Maker] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager_one_f_one_b,
}  # fmt: skip
BOUNDED = ("1f1b", "eager-1f1b")
"""Those that keep a number of micro-batches which does not grow with ``m``."""


def plan(
    schedule: str | Maker,
    m: int,
    n: int,
    placement: Sequence[int] | None = None,
    recomputed: int = 0,
) -> StepSchedule:
    """The schedule of a step, checked.

    Args:
        schedule: ``'gpipe'``, ``'1f1b'``, ``'eager-1f1b'``, or a function from ``m``, ``n`` and
            the placement to ticks: lists of :class:`Action`, with ``F``, ``R`` and ``B`` of each
            micro-batch and partition. It must be pure: its result is kept.
        m: micro-batches.
        n: partitions.
        placement: the worker of each partition; default one for each.
        recomputed: how many micro-batches, from the first, are recomputed. The ``R`` of others are
            left out, and what comes after them moves up.

    Raises:
        ValueError: there is no schedule of that name, or it breaks a rule.
        TypeError: ``schedule`` is neither, or the function makes something else.
    """
    if isinstance(schedule, str) and schedule not in _NAMED:
        raise ValueError(
            f"schedule must be one of {list(_NAMED)}, or a function that makes one, got "
            f"{schedule!r}"
        )
    if m < 1 or n < 1 or not 0 <= recomputed <= m:
        raise ValueError(
            "m and n must be positive and recomputed at most m, got "
            f"m={m}, n={n} and recomputed={recomputed}"
        )
    maker = _NAMED[schedule] if isinstance(schedule, str) else schedule
    if not callable(maker) or not isinstance(maker, Hashable):
        raise TypeError(f"schedule must be a name or a function that makes one, got {schedule!r}")
    return _plan(maker, m, n, tuple(range(n) if placement is None else placement), recomputed)


@dataclass(frozen=True)
class _Call:
    """The actions of a call; its backward is autograd's."""

    placement: tuple[int, ...]
    order: tuple[Action, ...]

    def needs(self, action: Action) -> Iterator[Action]:
        if action.j > 0:
            yield Action(FORWARD, action.i, action.j - 1)


def plan_call(m: int, n: int, placement: Sequence[int]) -> _Call:
    """The plan of a call: the clock-cycle."""
    order = [Action(FORWARD, i, j) for i, j in Schedule(m, n)]
    return _Call(tuple(placement), tuple(order))


@lru_cache(maxsize=64)
def _plan(
    maker: Maker, m: int, n: int, placement: tuple[int, ...], recomputed: int
) -> StepSchedule:
    try:
        ticks = tuple([tuple([Action(*a) for a in tick]) for tick in maker(m, n, placement)])
    except TypeError as error:
        raise TypeError(
            "a function that makes a schedule returns ticks, each a list of Action(kind, i, j)"
        ) from error
    whole = StepSchedule(m, n, placement, m, ticks)  # checked before anything is left out of it
    if recomputed == m:
        return whole
    workers = sorted(set(placement))
    kept = [a for a in whole.order if a.kind != RECOMPUTE or a.i < recomputed]
    orders = [[a for a in kept if placement[a.j] == worker] for worker in workers]
    ticks = tuple([tuple(tick) for tick in _lay_out(orders, workers)])
    return StepSchedule(m, n, placement, recomputed, ticks)
