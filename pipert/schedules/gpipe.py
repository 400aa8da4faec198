"""GPipe: fill and drain (section 2.1 of the paper)."""

from __future__ import annotations

from pipert.schedules.action import FORWARD, Action
from pipert.schedules.ticks import Shape, Ticks, go_back, lay_out

__all__: list[str] = []


def gpipe(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Fill and drain: all forwards, then all backwards, the last micro-batch first.

    The order of ``pipe(x)`` and ``loss.backward()`` (section 2.1 of the paper). Every partition
    keeps all micro-batches.
    """
    sequences = [
        [*(Action(FORWARD, i, j) for i in range(m)), *go_back(reversed(range(m)), j)]
        for j in range(n)
    ]
    return lay_out(sequences, placement, Shape(m, n, m))
