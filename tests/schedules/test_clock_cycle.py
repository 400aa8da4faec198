"""Tests the clock-cycle as data: its order, its text form, its promises to the workers."""

from __future__ import annotations

import pytest

from pipert.schedules import Action
from pipert.schedules.orders import clock_cycle
from pipert.schedules.plan import Plan, plan_call

SIZES = [(m, n) for m in (1, 2, 3, 8) for n in (1, 2, 3, 5)]
every_size = pytest.mark.parametrize(("m", "n"), SIZES)


def cycle(m: int, n: int) -> Plan:
    return plan_call(m, n, range(n))


def test_diagonals_of_three_micro_batches_on_two_partitions() -> None:
    assert list(clock_cycle(3, 2, (0, 1))) == [
        [Action("F", 0, 0)],
        [Action("F", 1, 0), Action("F", 0, 1)],
        [Action("F", 2, 0), Action("F", 1, 1)],
        [Action("F", 2, 1)],
    ]


@every_size
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_order_of_diagonals_does_not_depend_on_the_workers(
    m: int, n: int, workers: int
) -> None:
    shared = plan_call(m, n, [j % workers for j in range(n)])
    assert shared.order == cycle(m, n).order


def test_a_worker_does_its_actions_of_a_diagonal_in_consecutive_ticks() -> None:
    assert [" ".join(map(str, tick)) for tick in plan_call(2, 2, (0, 0)).ticks] == [
        "F[0,0]", "F[1,0]", "F[0,1]", "F[1,1]",
    ]  # fmt: skip


def test_a_plan_prints_as_a_grid() -> None:
    assert str(cycle(3, 2)).splitlines() == [
        "tick  0       1       2       3",
        "w=0   F[0,0]  F[1,0]  F[2,0]",
        "w=1           F[0,1]  F[1,1]  F[2,1]",
    ]


@pytest.mark.parametrize(("m", "n"), [(0, 1), (1, 0), (-1, 2)])
def test_sizes_must_be_positive(m: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"must be positive, got m={m}, n={n}"):
        plan_call(m, n, range(n))
