"""Chooses a subset of cases that still contains every pair of values that occurs in one case.

A test with four parameters of three values each has 81 cases. Most mistakes show with a particular
pair of values: nine to twelve cases contain all pairs. The choice depends only on the order of the
cases, so every run has the same ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations

__all__ = ["pairwise"]


def pairwise(cases: Sequence[Sequence[Hashable]], keep: Iterable[int] = ()) -> list[int]:
    """Chooses cases so that each pair of values that occurs in a case occurs in a chosen one.

    Args:
        cases: in each, the values of the same parameters. The cases need not be a full product;
            impossible combinations may be missing.
        keep: the indices of cases to choose in any case.

    Returns:
        The indices of the chosen cases, in order. They are chosen greedily: next is always the
        first of the cases with the most missing pairs.
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
    """Yields the pairs of a case's values, with their parameters' indices, or its one value."""
    values = list(enumerate(case))
    return combinations(values, min(2, len(values)))
