"""Alternates forwards and backwards: schedules that bound the number of micro-batches kept."""

from __future__ import annotations

from collections.abc import Sequence

from pipert.schedules.action import Size
from pipert.schedules.ticks import Ticks, in_turns, lay_out

__all__: list[str] = []


def one_f_one_b(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """One forward, one backward: a partition does a backward as soon as it can.

    Partition *j* keeps at most ``min(m, n - j)`` micro-batches.
    """
    return _keeping(m, [n - j for j in range(n)], placement)


def eager_one_f_one_b(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """One forward, one backward, with one more micro-batch in transit over each link.

    Under :func:`one_f_one_b` a partition sends a gradient back, does one forward and one backward,
    and then needs the input that the previous partition makes once it has that gradient. So every
    turn waits for both directions of the link. Here a partition has two forwards and two backwards
    to do in that time, and waits for nothing as long as both directions together take no longer
    than a forward and a backward (*eager 1F1B* in arXiv:2211.05322).

    Partition *j* keeps at most ``min(m, 2 * (n - j) - 1)`` micro-batches.
    """
    return _keeping(m, [2 * (n - j) - 1 for j in range(n)], placement)


def _keeping(m: int, most: Sequence[int], placement: tuple[int, ...]) -> Ticks:
    """Alternate forwards and backwards, after ``most[j]`` forwards in partition ``j``."""
    tasks = [[(i, j) for i in range(m)] for j in range(len(most))]
    sequences = [in_turns(pairs, pairs, ahead) for pairs, ahead in zip(tasks, most, strict=True)]
    return lay_out(sequences, placement, Size(m, len(most), m))
