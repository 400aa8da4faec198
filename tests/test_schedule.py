"""The clock-cycle as data: its order, its text form, what it promises to the workers."""

from __future__ import annotations

import pytest

from pipert.schedules.clock_cycle import Forward, Schedule

SIZES = [(m, n) for m in (1, 2, 3, 8) for n in (1, 2, 3, 5)]
every_size = pytest.mark.parametrize(("m", "n"), SIZES)


def test_diagonals_of_three_micro_batches_on_two_partitions() -> None:
    assert list(Schedule(3, 2).diagonals()) == [
        [Forward(0, 0)],
        [Forward(1, 0), Forward(0, 1)],
        [Forward(2, 0), Forward(1, 1)],
        [Forward(2, 1)],
    ]


@every_size
def test_there_are_m_plus_n_minus_one_clocks(m: int, n: int) -> None:
    assert len(list(Schedule(m, n).diagonals())) == m + n - 1


@every_size
def test_clock_k_is_the_diagonal_k(m: int, n: int) -> None:
    for k, diagonal in enumerate(Schedule(m, n).diagonals()):
        assert {i + j for i, j in diagonal} == {k}


@every_size
def test_each_task_occurs_once(m: int, n: int) -> None:
    assert sorted(Schedule(m, n)) == [(i, j) for i in range(m) for j in range(n)]


@every_size
def test_length_is_the_number_of_tasks(m: int, n: int) -> None:
    assert len(Schedule(m, n)) == len(list(Schedule(m, n)))


@every_size
def test_what_a_task_needs_comes_before_it(m: int, n: int) -> None:
    done: set[tuple[int, int]] = set()
    for i, j in Schedule(m, n):
        needs = {(i - 1, j)} if i else set()
        needs |= {(i, j - 1)} if j else set()
        assert needs <= done
        done.add((i, j))


@every_size
def test_partition_gets_its_micro_batches_in_order(m: int, n: int) -> None:
    for partition in range(n):
        assert [i for i, j in Schedule(m, n) if j == partition] == list(range(m))


@every_size
def test_position_grows_along_the_order(m: int, n: int) -> None:
    schedule = Schedule(m, n)
    positions = [schedule.position(i, j) for i, j in schedule]
    assert all(a < b for a, b in zip(positions, positions[1:], strict=False))


def test_task_prints_as_in_the_paper() -> None:
    assert str(Forward(2, 1)) == "F[2,1]"


def test_schedule_prints_as_a_grid() -> None:
    assert str(Schedule(m=3, n=2)).splitlines() == [
        "k       0       1       2       3",
        "j=0     F[0,0]  F[1,0]  F[2,0]",
        "j=1             F[0,1]  F[1,1]  F[2,1]",
    ]


def test_grid_makes_room_for_long_names() -> None:
    last = str(Schedule(m=11, n=1)).splitlines()[-1]
    assert last.split()[-1] == "F[10,0]"


def test_equal_sizes_are_equal_schedules() -> None:
    assert Schedule(3, 2) == Schedule(3, 2) != Schedule(2, 3)


def test_schedule_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Schedule(3, 2).m = 4  # type: ignore[misc]


@pytest.mark.parametrize(("m", "n"), [(0, 1), (1, 0), (-1, 2)])
def test_sizes_must_be_positive(m: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"must be positive, got m={m} and n={n}"):
        Schedule(m, n)
