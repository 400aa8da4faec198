"""The clock: what it posts to whom in which order, and who settles a task."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from pipert.engine.clock import LaneTask, Posting
from pipert.schedules.clock_cycle import Forward, Schedule
from pipert.stage.lane import Lane
from pipert.stage.outcome import Progress
from pipert.workers.activity import Activity, Seat
from pipert.workers.turn import Turn
from pipert.workers.worker import Task


class FakeLane:
    """Notes what is asked of it."""

    def __init__(self, j: int, progress: Progress) -> None:
        self.j = j
        self.progress = progress
        self.ran: list[int] = []
        self.abandoned: list[tuple[int, BaseException]] = []

    def perform(self, task: Forward, seat: Seat) -> None:
        self.ran.append(task.i)

    def abandon(self, task: Forward, error: BaseException) -> None:
        self.abandoned.append((task.i, error))
        self.progress.fail(Schedule(m=3, n=2).position(*task), error)


class Fixture:
    """A run of 3 micro-batches in 2 partitions, and what was posted of it."""

    def __init__(self, workers: list[int]) -> None:
        self.progress = Progress(Schedule(m=3, n=2))
        self.lanes = [FakeLane(0, self.progress), FakeLane(1, self.progress)]
        self.posted: list[tuple[int, Task]] = []
        self.seat = Seat(Turn(threading.Lock()), Activity())
        self.posting = Posting(cast(list[Lane], self.lanes), workers, self.put)

    def put(self, worker: int, task: Task) -> None:
        self.posted.append((worker, task))

    def task(self, i: int, j: int) -> LaneTask:
        return LaneTask(cast(Lane, self.lanes[j]), Forward(i, j))

    def unsettled(self) -> int:
        """How many tasks of the run are not settled yet; settles them."""
        for count in range(7):
            try:
                self.progress.settle()
            except AssertionError:
                return count
        raise AssertionError


@pytest.fixture
def run() -> Fixture:
    return Fixture(workers=[0, 1])


def test_tasks_are_posted_diagonal_by_diagonal(run: Fixture) -> None:
    run.posting.run(run.seat)
    assert [repr(task) for _, task in run.posted] == [
        "<LaneTask F[0,0]>",
        "<LaneTask F[1,0]>",
        "<LaneTask F[0,1]>",
        "<LaneTask F[2,0]>",
        "<LaneTask F[1,1]>",
        "<LaneTask F[2,1]>",
    ]


def test_each_partition_is_posted_to_its_worker(run: Fixture) -> None:
    run.posting.run(run.seat)
    assert [worker for worker, _ in run.posted] == [0, 0, 1, 0, 1, 1]


def test_one_worker_may_get_all_partitions() -> None:
    run = Fixture(workers=[0, 0])
    run.posting.run(run.seat)
    assert {worker for worker, _ in run.posted} == {0}


def test_nothing_is_waited_for_between_diagonals(run: Fixture) -> None:
    run.posting.run(run.seat)  # nobody runs the tasks
    assert len(run.posted) == 6 and run.unsettled() == 6


def test_a_run_is_posted_once_however_often_the_clock_gets_it(run: Fixture) -> None:
    run.posting.run(run.seat)
    run.posting.run(run.seat)
    assert len(run.posted) == 6


def test_an_abandoned_run_is_not_posted(run: Fixture) -> None:
    run.posting.abandon(ValueError())
    run.posting.run(run.seat)
    assert not run.posted


def test_to_abandon_a_run_skips_and_settles_each_task(run: Fixture) -> None:
    error = ValueError()
    run.posting.abandon(error)
    assert [lane.abandoned for lane in run.lanes] == 2 * [[(0, error), (1, error), (2, error)]]
    assert run.unsettled() == 0


def test_to_abandon_a_posted_run_leaves_its_tasks_to_the_workers(run: Fixture) -> None:
    run.posting.run(run.seat)
    run.posting.abandon(ValueError())
    assert run.progress.take_error() is None and run.unsettled() == 6


def test_a_run_is_abandoned_once(run: Fixture) -> None:
    run.posting.abandon(ValueError())
    run.posting.abandon(ValueError())
    assert [len(lane.abandoned) for lane in run.lanes] == [3, 3]


def test_a_task_settles_once_it_has_run(run: Fixture) -> None:
    run.task(1, 0).run(run.seat)
    assert run.lanes[0].ran == [1] and run.unsettled() == 5


def test_an_abandoned_task_is_settled_once_its_lane_knows(run: Fixture) -> None:
    error = ValueError()
    run.task(1, 0).abandon(error)
    assert run.lanes[0].abandoned == [(1, error)] and run.unsettled() == 5


def test_an_abandoned_task_does_not_run(run: Fixture) -> None:
    run.task(1, 0).abandon(ValueError())
    assert run.lanes[0].ran == []


def test_to_abandon_a_task_that_has_run_does_nothing(run: Fixture) -> None:
    task = run.task(1, 0)
    task.run(run.seat)
    task.abandon(ValueError())
    assert run.lanes[0].abandoned == [] and run.unsettled() == 5


def test_the_repr_of_a_posting_shows_its_run(run: Fixture) -> None:
    assert repr(run.posting) == "<Posting of <Progress of m=3 n=2, running>>"
