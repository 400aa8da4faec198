"""Orders actions as GPipe does: the clock-cycle of ``pipe(x)``, and fill and drain for a step."""

from __future__ import annotations

from collections.abc import Iterator

from pipert.schedules.action import FORWARD, Action, Size, Ticks, in_turns, lay_out


def clock_cycle(m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
    """Make the deterministic clock-cycle (section 3.2.1 of the paper), diagonal by diagonal.

    Clock *k* has all ``F[i,j]`` with ``i + j == k``. The backward is autograd's. A worker that
    serves several partitions does its actions of one diagonal in consecutive ticks.
    """
    for k in range(m + n - 1):
        tick: list[Action] = []
        for j in range(max(0, k - m + 1), min(n, k + 1)):
            if any(placement[other.j] == placement[j] for other in tick):
                yield tick
                tick = []
            tick.append(Action(FORWARD, k - j, j))
        yield tick


def gpipe(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Fill and drain: all forwards, then all backwards, the last micro-batch first.

    The order of ``pipe(x)`` and ``loss.backward()`` (section 2.1 of the paper). Every partition
    keeps all micro-batches.
    """
    tasks = [[(i, j) for i in range(m)] for j in range(n)]
    sequences = [in_turns(pairs, pairs[::-1], m) for pairs in tasks]
    return lay_out(sequences, placement, [Size(m, n, m)] * n)
