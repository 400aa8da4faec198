"""Fewer cases than there are, in which every two values that meet somewhere still meet.

A test with four parameters of three values each has 81 cases. Most mistakes need no more than two
of the values: nine to twelve cases have every two of them together. Which ones is decided by the
order of the cases alone, so that everybody runs the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations

__all__ = ["pairwise"]


def pairwise(cases: Sequence[Sequence[Hashable]], keep: Iterable[int] = ()) -> list[int]:
    """Choose cases, so that each two values that occur together in one do so in a chosen one.

    Args:
        cases: the values of the same parameters in each; they need not be a full product, and what
            does not go together is left out of them.
        keep: the places of cases that are chosen whatever else is.

    Returns:
        The places of the chosen cases, in order. Each time the first of those is taken that have
        the most pairs which no chosen one has.
    """
    pairs = [set(_pairs(case)) for case in cases]
    chosen = set(keep)
    missing = set().union(*pairs).difference(*(pairs[k] for k in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return sorted(chosen)


def _pairs(case: Sequence[Hashable]) -> Iterator[Hashable]:
    """Each two values of a case, with the places of their parameters; or its only value."""
    values = list(enumerate(case))
    return combinations(values, min(2, len(values)))
