"""The deterministic clock-cycle (section 3.2.1 of the paper): the schedule of ``pipe(x)``."""

from __future__ import annotations

from collections.abc import Iterator

from pipert.schedules.action import FORWARD, Action

__all__: list[str] = []


def clock_cycle(m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
    """Compute diagonal by diagonal: clock *k* has all ``F[i,j]`` with ``i + j == k``.

    The backward is autograd's. A worker that serves several partitions does its actions of one
    diagonal in consecutive ticks.
    """
    for k in range(m + n - 1):
        tick: list[Action] = []
        for j in range(max(0, k - m + 1), min(n, k + 1)):
            if any(placement[other.j] == placement[j] for other in tick):
                yield tick
                tick = []
            tick.append(Action(FORWARD, k - j, j))
        yield tick
