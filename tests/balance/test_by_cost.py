"""Tests balances from known costs against every composition, and the messages of refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch

from pipert.balance import balance_by_cost
from pipert.balance.by_cost import minimise_longest_block

Draw = Callable[[random.Random], float]

COSTS: dict[str, Draw] = {
    "small ints": lambda r: r.randint(0, 5),
    "large ints": lambda r: r.randrange(10**30),
    "floats": lambda r: r.random(),
    "zeros and floats": lambda r: r.choice((0, 0.0, r.random())),
    "zeros and ones": lambda r: r.randint(0, 1),
    "all magnitudes": lambda r: r.choice((1, 1.0, 0.0, 2.0 ** r.randint(-1074, 1000))),
    "nearly equal": lambda r: 1 + r.randint(0, 3) * 2.0**-52,
}
SPEEDS: dict[str, Draw] = {
    "equal": lambda r: 1,
    "a few": lambda r: r.choice((1, 2, 10)),
    "floats": lambda r: r.uniform(0.5, 2),
    "all magnitudes": lambda r: 10.0 ** r.randint(-300, 300),
}


def longest(
    counts: Sequence[int],
    costs: Sequence[float],
    speeds: Sequence[float],
    entries: Sequence[float] | None = None,
    exits: Sequence[float] | None = None,
) -> Fraction:
    """Returns the cost of the longest block, in fractions."""
    exact = [Fraction(cost) for cost in costs]
    first = [Fraction(entry) for entry in entries or [0] * len(costs)]
    last = [Fraction(leaving) for leaving in exits or [0] * len(costs)]
    return max(
        first[s] + sum(exact[s:e]) / Fraction(speed) + last[e - 1]
        for (s, e), speed in zip(pairwise([0, *accumulate(counts)]), speeds, strict=True)
    )


def compositions(layers: int, n: int) -> Iterator[list[int]]:
    """Yields every way to write ``layers`` as a sum of ``n`` positive numbers."""
    for cuts in combinations(range(1, layers), n - 1):
        yield [e - s for s, e in pairwise((0, *cuts, layers))]


def shortest(
    costs: Sequence[float],
    speeds: Sequence[float],
    entries: Sequence[float] | None = None,
    exits: Sequence[float] | None = None,
) -> Fraction:
    """Finds the longest block of the best composition by trying all."""
    every = compositions(len(costs), len(speeds))
    return min(longest(counts, costs, speeds, entries, exits) for counts in every)


def check_shape(counts: list[int], layers: int, n: int) -> None:
    assert len(counts) == n
    assert sum(counts) == layers
    assert min(counts) >= 1


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("crossing", ["none", "in", "in and out"])
def test_no_composition_has_a_shorter_longest_block(cost: str, speed: str, crossing: str) -> None:
    r = random.Random(f"{cost} {speed} {crossing}")
    for _ in range(25):
        layers = r.randint(1, 8)
        n = r.randint(1, min(layers, 5))
        costs = [COSTS[cost](r) for _ in range(layers)]
        speeds = [SPEEDS[speed](r) for _ in range(n)]
        cuts = [r.choice((0, 1, 3)) * COSTS[cost](r) for _ in range(layers)]
        ends = {"none": [], "in": [cuts], "in and out": [cuts, [*cuts[1:], 0]]}[crossing]
        if crossing == "in":
            counts = minimise_longest_block(costs, speeds, cuts)
        else:
            options: Any = {"crossing": cuts} if ends else {}
            counts = balance_by_cost(costs, n, speeds=speeds, **options)
        check_shape(counts, layers, n)
        assert longest(counts, costs, speeds, *ends) == shortest(costs, speeds, *ends)


def test_a_cut_where_little_crosses_is_worth_an_uneven_balance() -> None:
    assert balance_by_cost([1, 1, 1, 1], 2, crossing=[0, 2, 2, 0.5]) == [3, 1]
    assert balance_by_cost([1, 1, 1, 1], 2, crossing=[0, 2, 1, 0.5]) == [2, 2]


@pytest.mark.parametrize(
    ("costs", "partitions", "counts"),
    [([7], 1, [1]), ([3, 1], 2, [1, 1]), ([1, 2, 3], 1, [3]), ([2, 3, 4, 1, 1], 3, [2, 1, 2])],
)
def test_small_cases_have_the_expected_balance(
    costs: list[float], partitions: int, counts: list[int]
) -> None:
    assert balance_by_cost(costs, partitions) == counts


@pytest.mark.parametrize("cost", [0, 1.5])
def test_equal_layers_are_split_evenly(cost: float) -> None:
    assert sorted(balance_by_cost([cost] * 10, 4)) == [2, 2, 3, 3]


@pytest.mark.parametrize("place", [0, 3, 6])
def test_layers_beside_the_longest_block_are_split_optimally_too(place: int) -> None:
    costs = [1] * 7
    costs[place] = 100
    counts = balance_by_cost(costs, 3)
    assert sorted(counts) == [1, 3, 3]


def test_unit_does_not_matter() -> None:
    r = random.Random(0)
    costs = [r.random() for _ in range(50)]
    speeds = [r.random() + 0.1 for _ in range(7)]
    counts = balance_by_cost(costs, 7, speeds=speeds)
    assert counts == balance_by_cost([c * 2**40 for c in costs], 7, speeds=[s / 8 for s in speeds])


def test_numbers_may_be_tensors() -> None:
    costs: Any = torch.tensor([2, 3, 4, 1, 1])
    assert balance_by_cost(costs, 3) == [2, 1, 2]


@pytest.mark.parametrize(
    ("costs", "partitions", "options", "told"),
    [
        ([1, 2, 3], 2.0, {}, "partitions must be an int"),
        ([1, 2, 3], 0, {}, "partitions must be 1 or more, got 0; give"),
        ([1, 2], 3, {}, "got 3 partitions and 2 layers; use fewer"),
        ([1, math.nan, 3], 2, {}, r"not negative, but costs\[1\] is nan"),
        ([1, 2, 3], 2, {"crossing": [0, -1, 0]}, r"not negative, but crossing\[1\] is -1"),
        ([1, 2, 3], 2, {"crossing": [1]}, "one number for each of the 3 layers, got 1; give"),
        ([1, 2, 3], 2, {"speeds": [1, math.inf]}, r"not negative, but speeds\[1\] is inf"),
        ([1, 2, 3], 2, {"speeds": [1, 0]}, "positive, one for each of the 2 partitions, got"),
        ([1, 2, 3], 2, {"speeds": [1]}, "positive, one for each of the 2 partitions, got"),
    ],
)
def test_wrong_arguments_are_refused(
    costs: list[float], partitions: Any, options: Any, told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        balance_by_cost(costs, partitions, **options)
