"""When each action of a plan starts and ends, from what each of them takes: nothing runs here.

1. A worker does its actions one at a time, in the order of the plan.
2. It starts one when the last of what this needs has ended. Nothing is lost on the way: who wants
   copies or waits to take time has them in his plan, as actions of workers of their own.

The order of a plan has what an action needs before it, so one pass over it is enough.

>>> times = simulate(plan("1f1b", m=2, n=2), lambda action: 1 if action.kind == "F" else 2)
>>> times["F", 1, 1], times["B", 1, 0]
(Span(start=4, end=5), Span(start=7, end=9))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

__all__: list[str] = []


class Placed(Hashable, Protocol):
    """What is done for partition ``j``."""

    @property
    def j(self) -> int: ...


A = TypeVar("A", bound=Placed)


class Ordered(Protocol[A]):
    """What a simulation asks of a plan."""

    @property
    def order(self) -> Iterable[A]:
        """Each action, behind all that it needs."""

    @property
    def placement(self) -> Sequence[int]:
        """The worker of each partition."""

    def needs(self, action: A) -> Iterable[A]:
        """What has to be done before ``action``."""


class Span(NamedTuple):
    """From when to when an action is done, in seconds after the first."""

    start: float
    end: float


def simulate(plan: Ordered[A], seconds: Callable[[A], float]) -> dict[A, Span]:
    """When each action of ``plan`` is done, if it takes ``seconds(action)``."""
    free = dict.fromkeys(plan.placement, 0.0)
    times: dict[A, Span] = {}
    for action in plan.order:
        worker = plan.placement[action.j]
        start = max([free[worker], *[times[needed].end for needed in plan.needs(action)]])
        free[worker] = start + seconds(action)
        times[action] = Span(start, free[worker])
    return times
