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
every_kind = pytest.mark.parametrize("speed", SPEEDS)


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


def check_optimal(
    counts: list[int],
    costs: Sequence[float],
    speeds: Sequence[float],
    entries: Sequence[float] | None = None,
    exits: Sequence[float] | None = None,
) -> None:
    """Follow all places where blocks below the longest could end: the last layer is not one."""
    check_shape(counts, len(costs), len(speeds))
    limit = longest(counts, costs, speeds, entries, exits)
    none = [0] * len(costs)
    exact = [Fraction(x) for x in (*costs, *(entries or none), *(exits or none), *speeds)]
    unit = math.lcm(*(x.denominator for x in exact))
    whole = [int(x * unit) for x in exact]
    layers = len(costs)
    first, last = whole[layers : 2 * layers], [0, *whole[2 * layers : 3 * layers]]
    totals = [0, *accumulate(unit * cost for cost in whole[:layers])]
    ends = {0}
    for speed in whole[3 * layers :]:
        most = math.ceil(limit * speed * unit) - 1
        starts, ends = ends, set()
        best = -math.inf
        for t, total in enumerate(totals):
            if total + speed * last[t] - most <= best:
                ends.add(t)
            if t in starts and t < layers:
                best = max(best, total - speed * first[t])
    assert layers not in ends


@every_kind
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


@every_kind
@pytest.mark.parametrize("leaving", [0, 2])
@pytest.mark.parametrize("entry", [0, 0.5, 3])
def test_forty_layers_are_split_as_well_as_can_be(
    speed: str, entry: float, leaving: float
) -> None:
    r = random.Random(f"{speed} {entry}")
    for _ in range(15):
        n = r.randint(2, 12)
        costs = [r.choice((0, 1, r.random(), r.expovariate(0.3))) for _ in range(40)]
        ends = [[entry * r.random() for _ in costs], [leaving * r.random() for _ in costs]]
        speeds = [SPEEDS[speed](r) for _ in range(n)]
        check_optimal(minimise_longest_block(costs, speeds, *ends), costs, speeds, *ends)


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


def test_iterators_are_taken_and_nothing_is_changed() -> None:
    costs, speeds = [1, 2, 3], [1, 2]
    given = balance_by_cost(iter(costs), 2, speeds=iter(speeds))
    assert given == balance_by_cost(costs, 2, speeds=speeds)
    assert (costs, speeds) == ([1, 2, 3], [1, 2])


def test_integers_beyond_the_floats_are_taken() -> None:
    assert balance_by_cost([10**400, 10**400, 2 * 10**400], 2) == [2, 1]


# What is refused.


@pytest.mark.parametrize("partitions", [2.0, "2", None, [2]], ids=repr)
def test_partitions_must_be_a_whole_number(partitions: Any) -> None:
    with pytest.raises(TypeError, match="partitions must be an int"):
        balance_by_cost([1, 2, 3], partitions)


@pytest.mark.parametrize("partitions", [0, -1])
def test_partitions_must_be_positive(partitions: int) -> None:
    with pytest.raises(ValueError, match=f"partitions must be 1 or more, got {partitions}; give"):
        balance_by_cost([1, 2, 3], partitions)


@pytest.mark.parametrize("costs", [[], [1, 2]], ids=repr)
def test_each_partition_needs_a_layer(costs: list[float]) -> None:
    with pytest.raises(ValueError, match=f"got 3 partitions and {len(costs)} layers; use fewer"):
        balance_by_cost(costs, 3)


@pytest.mark.parametrize("cost", [-1, -0.5, math.nan, math.inf, -math.inf], ids=repr)
def test_costs_must_be_finite_and_not_negative(cost: float) -> None:
    with pytest.raises(ValueError, match=f"not negative, but costs\\[1\\] is {cost!r}"):
        balance_by_cost([1, cost, 3], 2)
    with pytest.raises(ValueError, match=f"not negative, but crossing\\[1\\] is {cost!r}"):
        balance_by_cost([1, 2, 3], 2, crossing=[0, cost, 0])
    with pytest.raises(ValueError, match=f"not negative, but speeds\\[1\\] is {cost!r}"):
        balance_by_cost([1, 2, 3], 2, speeds=[1, cost])


@pytest.mark.parametrize("costs", [[1, None, 2], [1, 1j, 2], [1, [1], 2], 3, None], ids=repr)
def test_costs_must_be_numbers(costs: Any) -> None:
    with pytest.raises(TypeError):
        balance_by_cost(costs, 2)


def test_numbers_may_be_tensors() -> None:
    costs: Any = torch.tensor([2, 3, 4, 1, 1])
    assert balance_by_cost(costs, 3) == [2, 1, 2]


@pytest.mark.parametrize("speeds", [[], [1], [1, 1, 1], [1, 0]], ids=repr)
def test_there_must_be_a_positive_speed_for_each_partition(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match="positive, one for each of the 2 partitions, got"):
        balance_by_cost([1, 2, 3], 2, speeds=speeds)


@pytest.mark.parametrize("crossing", [[], [1], [1, 1, 1, 1]], ids=repr)
def test_there_must_be_a_transfer_before_each_layer(crossing: list[float]) -> None:
    message = f"crossing must have one number for each of the 3 layers, got {len(crossing)}; give"
    with pytest.raises(ValueError, match=message):
        balance_by_cost([1, 2, 3], 2, crossing=crossing)
