"""What an exact balance promises whatever the costs; ``balance`` has it against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipert.balance import balance_by_cost
from pipert.balance.blocks import minimise_longest_block

pytestmark = pytest.mark.slow

# Whole numbers, halves that collide, and all floats down to the smallest.
cost = st.integers(0, 9) | st.floats(0, 4).map(lambda x: round(2 * x) / 2) | st.floats(0, 1e300)
speed = st.sampled_from([1, 2, 0.5]) | st.floats(1e-3, 1e3)
layers = st.lists(cost, min_size=1, max_size=12)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Costs of layers and speeds of devices, no more of these than layers."""
    costs = draw(layers)
    return costs, draw(st.lists(speed, min_size=1, max_size=len(costs)))


def blocks(
    counts: Sequence[int], costs: Sequence[float], speeds: Sequence[float]
) -> list[Fraction]:
    """Returns the exact time of each device."""
    totals = [Fraction(0), *accumulate(map(Fraction, costs))]
    cuts = pairwise([0, *accumulate(counts)])
    return [
        (totals[e] - totals[s]) / Fraction(v) for (s, e), v in zip(cuts, speeds, strict=True)
    ]


def best(costs: Sequence[float], speeds: Sequence[float]) -> Fraction:
    """Returns the longest block of the balance found."""
    counts = balance_by_cost(costs, len(speeds), speeds=speeds)
    return max(blocks(counts, costs, speeds))


@given(chains())
def test_every_layer_is_in_one_block_and_no_block_is_empty(
    chain: tuple[list[float], list[float]]
) -> None:
    costs, speeds = chain
    counts = balance_by_cost(costs, len(speeds), speeds=speeds)
    assert len(counts) == len(speeds)
    assert sum(counts) == len(costs)
    assert min(counts) >= 1


@given(chains())
def test_no_layer_can_move_to_a_neighbour_for_a_shorter_longest_block(
    chain: tuple[list[float], list[float]]
) -> None:
    costs, speeds = chain
    counts = balance_by_cost(costs, len(speeds), speeds=speeds)
    longest = max(blocks(counts, costs, speeds))
    for j in range(len(counts) - 1):
        for giver, taker in ((j, j + 1), (j + 1, j)):
            if counts[giver] > 1:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                assert max(blocks(moved, costs, speeds)) >= longest


@given(layers, st.data())
def test_one_more_equal_device_is_never_slower(costs: list[float], data: st.DataObject) -> None:
    assume(len(costs) > 1)
    n = data.draw(st.integers(1, len(costs) - 1))
    assert best(costs, [1] * (n + 1)) <= best(costs, [1] * n)


@given(chains(), st.data(), st.floats(1, 8))
def test_a_faster_device_is_never_slower(
    chain: tuple[list[float], list[float]], data: st.DataObject, factor: float
) -> None:
    costs, speeds = chain
    j = data.draw(st.integers(0, len(speeds) - 1))
    faster = [v * factor if k == j else v for k, v in enumerate(speeds)]
    assert best(costs, faster) <= best(costs, speeds)


@given(chains(), st.data(), cost)
def test_a_layer_that_costs_more_is_never_faster(
    chain: tuple[list[float], list[float]], data: st.DataObject, other: float
) -> None:
    costs, speeds = chain
    k = data.draw(st.integers(0, len(costs) - 1))
    dearer = [max(x, other) if s == k else x for s, x in enumerate(costs)]
    assert best(dearer, speeds) >= best(costs, speeds)


@given(chains())
def test_the_reversed_chain_takes_as_long(chain: tuple[list[float], list[float]]) -> None:
    costs, speeds = chain
    assert best(costs[::-1], speeds[::-1]) == best(costs, speeds)


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=12),
    st.data(),
    st.integers(1, 10**40),
)
def test_costs_in_another_unit_give_the_same_balance(
    costs: list[int], data: st.DataObject, unit: int
) -> None:
    n = data.draw(st.integers(1, len(costs)))
    scaled = [cost * unit for cost in costs]
    assert balance_by_cost(scaled, n) == balance_by_cost(costs, n)
    assert best(scaled, [1] * n) == unit * best(costs, [1] * n)


@given(chains(), st.data())
def test_entry_costs_that_are_the_same_everywhere_change_no_optimum_on_equal_devices(
    chain: tuple[list[float], list[float]], data: st.DataObject
) -> None:
    costs, speeds = chain
    entry = data.draw(st.integers(0, 9))
    equal = [1] * len(speeds)
    counts = minimise_longest_block(costs, equal, [entry] * len(costs))
    assert max(blocks(counts, costs, equal)) == best(costs, equal)


@given(chains(), st.data())
def test_transfers_cost_the_reversed_chain_as_much(
    chain: tuple[list[float], list[float]], data: st.DataObject
) -> None:
    costs, speeds = chain
    some = st.lists(cost, min_size=len(costs) - 1, max_size=len(costs) - 1)
    crossing = [0, *data.draw(some)]
    there = balance_by_cost(costs, len(speeds), speeds=speeds, crossing=crossing)
    back = balance_by_cost(
        costs[::-1], len(speeds), speeds=speeds[::-1], crossing=[0, *crossing[:0:-1]]
    )[::-1]
    assert slowest(there, costs, speeds, crossing) == slowest(back, costs, speeds, crossing)


def slowest(
    counts: Sequence[int],
    costs: Sequence[float],
    speeds: Sequence[float],
    crossing: Sequence[float],
) -> Fraction:
    """The longest block with what it receives and sends."""
    cuts = list(pairwise([0, *accumulate(counts)]))
    ends = [*map(Fraction, crossing), Fraction(0)]
    taken = blocks(counts, costs, speeds)
    return max(ends[s] + one + ends[e] for (s, e), one in zip(cuts, taken, strict=True))


# Refusals

wrong_costs = st.floats(max_value=0, exclude_max=True) | st.just(float("nan")) | st.just(1e999)


@given(layers, st.data(), wrong_costs)
def test_one_wrong_cost_is_refused_and_named_wherever_it_is(
    costs: list[float], data: st.DataObject, wrong: float
) -> None:
    k = data.draw(st.integers(0, len(costs) - 1))
    costs[k] = wrong
    with pytest.raises(ValueError, match=rf"costs\[{k}\]"):
        balance_by_cost(costs, 1)


@given(layers, st.integers(-3, 20))
def test_partitions_that_the_layers_are_not_enough_for_are_refused_and_no_others(
    costs: list[float], n: int
) -> None:
    if 1 <= n <= len(costs):
        assert len(balance_by_cost(costs, n)) == n
    else:
        with pytest.raises(ValueError, match="partitions"):
            balance_by_cost(costs, n)
