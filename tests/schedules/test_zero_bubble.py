"""Tests the schedules in which gradients of weights fill the bubble."""

from __future__ import annotations

import re

import pytest

from pipert.schedules import Action, Plan, plan
from pipert.schedules.plan import recomputed


def v_of(d: int) -> list[int]:
    return [*range(d), *reversed(range(d))]


def idle(found: Plan) -> int:
    """Returns the number of ticks in which a worker has nothing to do, of all together."""
    return len(set(found.placement)) * len(found.ticks) - len(found)


@pytest.mark.parametrize("d", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_bubble_is_smaller_than_that_of_1f1b(d: int, groups: int) -> None:
    """There a device waits for ``2 * (d - 1)`` tasks of a forward or a whole backward."""
    m = groups * d
    waits = 3 * d * (d - 1)  # a whole backward is two ticks of these
    zb_h1, zb_h2 = idle(plan("zb-h1", m, d)), idle(plan("zb-h2", m, d))
    zb_v = idle(plan("zb-v", m, 2 * d, v_of(d))) / 2
    assert zb_h2 <= zb_h1 < waits and zb_v < waits
    if groups > 1:
        assert zb_h2 == 2 * sum(range(d))  # no worker waits between its first and its last action


def test_zb_takes_the_v_where_the_placement_is_one() -> None:
    assert plan("zb", 4, 6, v_of(3)) == plan("zb-v", 4, 6, v_of(3))
    for placement in ([0, 1, 2], [0, 1, 0, 1], [0]):
        n = len(placement)
        assert plan("zb", 4, n, placement) == plan("zb-h1", 4, n, placement)


@pytest.mark.parametrize("placement", [[0, 1], [0, 1, 0, 1], [0, 1, 0], [1, 0, 0, 1]])
def test_zb_v_is_refused_where_the_placement_is_no_v(placement: list[int]) -> None:
    with pytest.raises(ValueError, match="'zb-v' is for twice as many partitions as devices"):
        plan("zb-v", 4, len(placement), placement)


def test_recomputations_come_right_before_their_backward() -> None:
    m, n = 5, 3
    found = plan("zb-h1", m, n, recomputed=recomputed("always", m))
    for j in range(n):
        order = [action for action in found if action.j == j]
        for k, action in enumerate(order):
            if action.kind == "R":
                assert order[k + 1] == Action("B", action.i, j)


@pytest.mark.parametrize("left_out", [Action("W", 1, 0), Action("W", 0, 1)])
def test_a_schedule_that_computes_some_gradients_of_weights_computes_all(left_out: Action) -> None:
    """The backward of each micro-batch puts them off, so they would be missing."""

    def schedule(m: int, n: int, placement: tuple[int, ...]) -> list[list[Action]]:
        whole = plan("zb-h1", m, n, recomputed=m).ticks
        return [[action for action in tick if action != left_out] for tick in whole]

    with pytest.raises(ValueError, match=re.escape(f"{left_out} is not in it")):
        plan(schedule, 2, 2)
