"""Each two values that meet in a case meet in a chosen one; the choice is always the same."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from tests.pairwise import pairwise

Case = tuple[object, ...]


def pairs(cases: list[Case]) -> set[tuple[int, object, int, object]]:
    places = [(case, a, b) for case in cases for a, b in combinations(range(len(case)), 2)]
    return {(a, case[a], b, case[b]) for case, a, b in places}


def some_of(cases: list[Case]) -> list[Case]:
    return random.Random(0).sample(cases, len(cases) // 3)


FULL: dict[str, list[Case]] = {
    "of two": list(product("ab", range(3))),
    "of the same size": list(product(*[range(3)] * 5)),
    "of different sizes": list(product("ab", range(7), (True, False), (None,), ("x", "y", "z"))),
}
PARTS = {f"some {name}": some_of(cases) for name, cases in FULL.items()}


@pytest.mark.parametrize("cases", (FULL | PARTS).values(), ids=(FULL | PARTS).keys())
def test_every_pair_of_values_is_covered(cases: list[Case]) -> None:
    assert pairs([cases[k] for k in pairwise(cases)]) == pairs(cases)


def test_a_subset_is_small() -> None:
    """No choice can be smaller than the number of pairs of the two largest parameters."""
    assert len(pairwise(FULL["of the same size"])) <= 16
    assert len(pairwise(FULL["of different sizes"])) == 21


def test_two_parameters_lose_no_case_and_one_loses_none() -> None:
    assert pairwise(FULL["of two"]) == list(range(6))
    assert pairwise([("a",), ("b",)]) == [0, 1]
    assert pairwise([]) == []


def test_a_repeated_case_is_chosen_once() -> None:
    assert pairwise([("a", 1), ("a", 1)]) == [0]


def test_the_choice_is_the_same_each_time_and_in_order() -> None:
    cases = FULL["of the same size"]
    assert pairwise(cases) == pairwise(cases) == sorted(pairwise(cases))


def test_kept_cases_are_chosen_and_their_pairs_need_no_other_case() -> None:
    cases = FULL["of the same size"]
    first = pairwise(cases)
    kept = pairwise(cases, keep=[200, 7])
    assert {200, 7} <= set(kept)
    assert pairs([cases[k] for k in kept]) == pairs(cases)
    assert pairwise(cases, keep=first) == first
