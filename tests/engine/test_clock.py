"""Tests the clock: which tasks it posts to which worker in which order, and who settles them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import cast

import pytest

from pipert.engine.clock import Posting
from pipert.schedules import Action
from pipert.schedules.plan import plan_call
from pipert.stage.outcome import Outcome
from pipert.stage.stage import How, Stage, Task
from pipert.workers import worker


class FakeRun:
    number = 7
    in_turn = False
    dropped = False

    def __init__(self, workers: list[int]) -> None:
        self.plan = plan_call(3, 2, workers)
        self.context = self
        self.variables = contextvars.copy_context()


class FakeStage:
    """A stage that notes its calls."""

    def __init__(self, run: FakeRun, outcome: Outcome) -> None:
        self.run = run
        self.outcome = outcome
        self.ran: list[int] = []
        self.sent: list[tuple[int, object]] = []
        how = How(lambda i: (), contextlib.nullcontext(), self.execute, self.send)
        self.how = {"F": how}
        self.after_sending: list[Callable[[], None]] = []

    def execute(self, stage: object, i: int, received: object) -> str:
        self.ran.append(i)
        return "done"

    def send(self, i: int, result: object) -> None:
        self.sent.append((i, result))


class Fixture:
    """A run of 3 micro-batches in 2 partitions, and its posted tasks."""

    def __init__(self, workers: list[int]) -> None:
        run = FakeRun(workers)
        self.outcome = Outcome(run.plan)
        self.stages = [FakeStage(run, self.outcome), FakeStage(run, self.outcome)]
        self.posted: list[tuple[int, worker.Task]] = []
        self.posting = Posting(cast(list[Stage], self.stages), self.put)

    def put(self, worker: int, task: worker.Task) -> None:
        self.posted.append((worker, task))

    def post(self) -> None:
        self.posting.send(self.posting.execute(self.posting.receive()))

    def task(self, i: int, j: int) -> Task:
        return Task(cast(Stage, self.stages[j]), Action("F", i, j))

    def unsettled(self) -> int:
        """Settles the unsettled tasks of the run; returns their number."""
        for count in range(7):
            try:
                self.outcome.settle()
            except AssertionError:
                return count
        raise AssertionError


def do(task: Task) -> None:
    task.send(task.execute(task.receive()))


@pytest.fixture
def run() -> Fixture:
    return Fixture(workers=[0, 1])


def test_tasks_are_posted_diagonal_by_diagonal(run: Fixture) -> None:
    run.post()
    assert [repr(task) for _, task in run.posted] == [
        "<Task F[0,0]>",
        "<Task F[1,0]>",
        "<Task F[0,1]>",
        "<Task F[2,0]>",
        "<Task F[1,1]>",
        "<Task F[2,1]>",
    ]


def test_each_partition_is_posted_to_its_worker(run: Fixture) -> None:
    run.post()
    assert [worker for worker, _ in run.posted] == [0, 0, 1, 0, 1, 1]


def test_one_worker_may_get_all_partitions() -> None:
    run = Fixture(workers=[0, 0])
    run.post()
    assert {worker for worker, _ in run.posted} == {0}


def test_nothing_is_waited_for_between_diagonals(run: Fixture) -> None:
    run.post()  # nobody runs the tasks
    assert len(run.posted) == 6 and run.unsettled() == 6


def test_a_run_that_the_clock_gets_several_times_is_posted_once(run: Fixture) -> None:
    run.post()
    run.post()
    assert len(run.posted) == 6


def test_an_abandoned_run_is_not_posted(run: Fixture) -> None:
    run.posting.abandon(ValueError())
    run.post()
    assert not run.posted


def test_abandoning_a_run_skips_and_settles_each_task(run: Fixture) -> None:
    error = ValueError()
    run.posting.abandon(error)
    assert [stage.sent for stage in run.stages] == 2 * [[(i, worker.NOT_RUN) for i in range(3)]]
    assert run.unsettled() == 0 and run.outcome.take_error() is error


def test_abandoning_a_posted_run_leaves_its_tasks_to_the_workers(run: Fixture) -> None:
    run.post()
    run.posting.abandon(ValueError())
    assert run.outcome.take_error() is None and run.unsettled() == 6


def test_a_run_is_abandoned_once(run: Fixture) -> None:
    run.posting.abandon(ValueError())
    run.posting.abandon(ValueError())
    assert [len(stage.sent) for stage in run.stages] == [3, 3]


def test_a_task_settles_once_it_has_run(run: Fixture) -> None:
    do(run.task(1, 0))
    assert run.stages[0].ran == [1] and run.unsettled() == 5


def test_an_abandoned_task_is_settled_once_its_run_knows(run: Fixture) -> None:
    error = ValueError()
    run.task(1, 0).abandon(error)
    assert run.stages[0].sent == [(1, worker.NOT_RUN)] and run.unsettled() == 5
    assert run.outcome.take_error() is error


def test_an_abandoned_task_does_not_run(run: Fixture) -> None:
    task = run.task(1, 0)
    task.abandon(ValueError())
    assert task.receive() is worker.NOT_RUN and run.stages[0].ran == []


def test_abandoning_a_task_that_has_run_does_nothing(run: Fixture) -> None:
    task = run.task(1, 0)
    do(task)
    task.abandon(ValueError())
    assert run.stages[0].sent == [(1, "done")] and run.unsettled() == 5


def test_the_repr_of_a_posting_shows_its_run(run: Fixture) -> None:
    assert repr(run.posting) == "<Posting of <Outcome of m=3 n=2, running>>"
