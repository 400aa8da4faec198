"""Computes, from durations, when each action of a plan starts and ends. Nothing runs here.

1. A worker does its actions one at a time, in the order of the plan.
2. It starts an action when the last of the actions that this needs has ended, and its result has
   been copied from another worker. Copies take turns with nothing.

In a plan's order each action comes after those it needs, so one pass is enough.

>>> times = simulate(plan("1f1b", m=2, n=2), lambda action: 1 if action.kind == "F" else 2)
>>> times["F", 1, 1], times["B", 1, 0]
((4, 5), (7, 9))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pipert.schedules.action import BACKWARD, FORWARD, WEIGHT, Action
from pipert.schedules.plan import Plan


def simulate(
    plan: Plan,
    seconds: Callable[[Action], float],
    copying: Callable[[int, int], float] = lambda *_: 0.0,
) -> dict[Action, tuple[float, float]]:
    """Return the start and end of each action of ``plan``.

    Args:
        plan: the plan.
        seconds: the time that each action takes.
        copying: the time of a copy from one partition to another, on another worker.
    """
    free = dict.fromkeys(plan.placement, 0.0)
    times: dict[Action, tuple[float, float]] = {}
    for action in plan.order:
        worker = plan.placement[action.j]
        start = free[worker]
        for needed in plan.needs(action):
            is_here = plan.placement[needed.j] == worker
            copied = 0.0 if is_here else copying(needed.j, action.j)
            start = max(start, times[needed][1] + copied)
        free[worker] = start + seconds(action)
        times[action] = start, free[worker]
    return times


def most_kept(plan: Plan, places: Sequence[int]) -> Counter[int]:
    """Count the most micro-batches that each place keeps, once for each of its partitions.

    Args:
        plan: the plan.
        places: the place of each partition, such as its worker.
    """
    last = WEIGHT if WEIGHT in plan.occurring_kinds else BACKWARD
    now, most = Counter[int](), Counter[int]()
    for action in plan.order:
        place = places[action.j]
        now[place] += (action.kind == FORWARD) - (action.kind == last)
        most[place] = max(most[place], now[place])
    return most
