"""When the actions of a plan are done, on plans that were worked out by hand and on formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pytest

from pipert.schedules import Action, Plan
from pipert.schedules.plan import plan, plan_call
from pipert.schedules.simulate import simulate


class Step(NamedTuple):
    """An action that is none of pipert's."""

    name: str
    j: int


@dataclass
class Chosen:
    """A plan that is none of pipert's."""

    order: list[Step]
    placement: list[int]
    needed: dict[Step, list[Step]] = field(default_factory=dict)

    def needs(self, action: Step) -> Iterable[Step]:
        return self.needed.get(action, [])


A, B, C = Step("a", 0), Step("b", 0), Step("c", 1)
SECONDS = {A: 1.0, B: 2.0, C: 4.0}


def times(chosen: Chosen) -> list[tuple[float, ...]]:
    found = simulate(cast(Plan, chosen), cast(Any, SECONDS.__getitem__))
    assert cast(Any, list(found)) == chosen.order
    return [tuple(span) for span in found.values()]


def bubble(of: Plan, found: dict[Action, tuple[float, float]]) -> float:
    """The share of the workers' time in which they wait."""
    busy = sum(end - start for start, end in found.values())
    return 1 - busy / (len(set(of.placement)) * max(end for _, end in found.values()))


def test_a_worker_does_its_actions_one_after_the_other_in_the_order_of_the_plan() -> None:
    assert times(Chosen([A, B], [0])) == [(0, 1), (1, 3)]
    assert times(Chosen([B, A], [0])) == [(0, 2), (2, 3)]


def test_nothing_runs_past_an_action_that_waits_on_its_worker() -> None:
    assert times(Chosen([C, A, B], [0, 1], {A: [C]})) == [(0, 4), (4, 5), (5, 7)]


def test_the_forward_starts_when_its_input_is_there_and_not_when_the_diagonal_is_over() -> None:
    slow = simulate(plan_call(3, 2, [0, 1]), lambda a: 10 if (a.i, a.j) == (0, 1) else 1)
    found = {(action.i, action.j): tuple(span) for action, span in slow.items()}
    assert (found[2, 0], found[1, 1]) == ((2, 3), (11, 12))


def test_a_step_takes_the_times_computed_by_hand() -> None:
    found = simulate(plan("1f1b", 2, 2, recomputed=1), lambda a: 2 if a.kind == "B" else 1)
    assert {str(action): tuple(span) for action, span in found.items()} == {
        **{"F[0,0]": (0, 1), "F[1,0]": (1, 2), "R[0,0]": (2, 3), "B[0,0]": (5, 7)},
        **{"F[0,1]": (1, 2), "R[0,1]": (2, 3), "B[0,1]": (3, 5), "F[1,1]": (5, 6)},
        **{"B[1,1]": (6, 8), "B[1,0]": (8, 10)},
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize(
    ("n", "m", "percent"),
    [(4, 8, 27.3), (4, 16, 15.8), (4, 32, 8.6), (8, 8, 46.7), (8, 16, 30.4), (8, 32, 17.9)],
)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_the_bubble_of_equal_partitions_follows_the_known_formula(
    schedule: str, n: int, m: int, percent: float, backward: float
) -> None:
    """(n - 1) / (m + n - 1)"""
    step = plan(schedule, m, n)
    found = simulate(step, lambda a: backward if a.kind == "B" else 1.0)
    assert 100 * bubble(step, found) == pytest.approx(percent, abs=0.05)
