"""What a schedule promises, for any number of micro-batches and partitions."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.schedules.clock_cycle import Forward, Schedule

counts = st.integers(1, 30)
schedules = st.builds(Schedule, counts, counts)
huge = st.builds(Schedule, st.integers(1, 10**6), st.integers(1, 10**6))


def needed_by(i: int, j: int) -> list[tuple[int, int]]:
    """The tasks that ``F[i,j]`` cannot start without."""
    return [(a, b) for a, b in ((i - 1, j), (i, j - 1)) if a >= 0 and b >= 0]


@given(schedules)
def test_every_task_occurs_once(schedule: Schedule) -> None:
    tasks = list(schedule)
    assert len(tasks) == len(schedule)
    assert set(tasks) == {(i, j) for i in range(schedule.m) for j in range(schedule.n)}


@given(schedules)
def test_clock_k_has_the_tasks_whose_sum_is_k_by_partition(schedule: Schedule) -> None:
    diagonals = list(schedule.diagonals())
    assert len(diagonals) == schedule.m + schedule.n - 1
    for k, diagonal in enumerate(diagonals):
        assert diagonal == sorted(diagonal, key=lambda task: task.j)
        assert {i + j for i, j in diagonal} == {k}


@given(schedules)
def test_positions_grow_strictly_along_the_order(schedule: Schedule) -> None:
    positions = [schedule.position(i, j) for i, j in schedule]
    assert positions == sorted(set(positions))


@given(huge, st.data())
def test_what_a_task_needs_has_a_smaller_position(schedule: Schedule, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, schedule.m - 1))
    j = data.draw(st.integers(0, schedule.n - 1))
    own = schedule.position(i, j)
    assert all(0 <= schedule.position(*task) < own for task in needed_by(i, j))


@given(huge, st.data())
def test_no_two_tasks_have_the_same_position(schedule: Schedule, data: st.DataObject) -> None:
    tasks = st.tuples(st.integers(0, schedule.m - 1), st.integers(0, schedule.n - 1))
    near = data.draw(tasks)
    others = [data.draw(tasks), (near[0] - 1, near[1] + 1), (near[0] + 1, near[1] - 1)]
    for i, j in others:
        if (i, j) != near and 0 <= i < schedule.m and 0 <= j < schedule.n:
            assert schedule.position(i, j) != schedule.position(*near)


@given(st.builds(Schedule, st.integers(1, 8), st.integers(1, 6)), st.data())
def test_workers_that_take_their_tasks_in_order_never_wait_for_each_other_in_a_circle(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Whatever worker serves which partitions, and whoever of them comes first."""
    serves = [data.draw(st.integers(0, 2)) for _ in range(schedule.n)]
    queues: list[deque[Forward]] = [deque() for _ in range(3)]
    for task in schedule:
        queues[serves[task.j]].append(task)
    done: set[tuple[int, int]] = set()
    while len(done) < len(schedule):
        ready = [queue for queue in queues if queue and done.issuperset(needed_by(*queue[0]))]
        assert ready, f"every worker waits: {[queue[0] for queue in queues if queue]}"
        done.add(data.draw(st.sampled_from(ready)).popleft())


@given(schedules)
def test_the_grid_shows_every_task_in_the_column_of_its_clock(schedule: Schedule) -> None:
    head, *rows = str(schedule).splitlines()
    assert head.split() == ["k", *map(str, range(schedule.m + schedule.n - 1))]
    assert len(rows) == schedule.n
    for j, row in enumerate(rows):
        assert row.split() == [f"j={j}", *(f"F[{i},{j}]" for i in range(schedule.m))]
        for i in range(schedule.m):
            place = row.index(f"F[{i},{j}]")
            assert head[place:].split()[0] == str(i + j)


@given(st.integers(-5, 5), st.integers(-5, 5))
def test_sizes_below_one_are_refused_and_no_others(m: int, n: int) -> None:
    if m >= 1 and n >= 1:
        assert len(Schedule(m, n)) == m * n
    else:
        with pytest.raises(ValueError, match="must be positive"):
            Schedule(m, n)
