"""Computes with sets of time intervals, each a pair of start and end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pipert.observe.event import Event

__all__: list[str] = []

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Returns disjoint intervals that cover the same time, and gaps of at most ``gap`` as well."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def times_of(events: Iterable[Event], kinds: Collection[str]) -> list[Interval]:
    """Returns the times at which there was an event of one of these kinds."""
    return union((event.start, event.end) for event in events if event.kind in kinds)


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of the intervals; overlaps count twice."""
    return sum(end - start for start, end in intervals)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Returns the time that both cover; each must be a result of :func:`union`."""
    common, a, b = [], 0, 0
    while a < len(one) and b < len(other):
        start, end = max(one[a][0], other[b][0]), min(one[a][1], other[b][1])
        if start < end:
            common.append((start, end))
        if one[a][1] < other[b][1]:
            a += 1
        else:
            b += 1
    return common
