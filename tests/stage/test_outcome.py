"""Tests Outcome: which failure counts, which tasks may start, and when a run is over."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator

import pytest

from pipert.schedules.plan import plan_call
from pipert.stage.outcome import Outcome
from pipert.workers.worker import NOT_RUN

TIMEOUT = 3.0  # s
PLAN = plan_call(3, 2, (0, 1))
ORDERS = list(itertools.permutations([2, 5, 7]))


@pytest.fixture
def outcome() -> Outcome:
    return Outcome(PLAN)


class RunError(Exception):
    """An error that, unlike built-in ones, can be referenced weakly."""


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_any_position_may_start_at_first(outcome: Outcome) -> None:
    assert all(position < outcome.failed_at for position in PLAN.positions.values())


def test_a_run_without_failures_has_no_error(outcome: Outcome) -> None:
    assert outcome.take_error() is None


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_error_at_the_first_position_is_raised_in_whatever_order_they_come(
    outcome: Outcome, order: tuple[int, ...]
) -> None:
    errors = {position: ValueError(position) for position in order}
    for position in order:
        outcome.fail(position, errors[position])
    assert outcome.take_error() is errors[2]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_first_failed_position_is_kept_in_whatever_order_they_come(
    outcome: Outcome, order: tuple[int, ...]
) -> None:
    for position in order:
        outcome.fail(position, ValueError())
    assert outcome.failed_at == 2


def test_the_earlier_of_two_errors_at_one_position_is_kept(outcome: Outcome) -> None:
    first = ValueError()
    outcome.fail(3, first)
    outcome.fail(3, KeyError())
    assert outcome.take_error() is first


def test_an_error_is_taken_once(outcome: Outcome) -> None:
    outcome.fail(3, ValueError())
    outcome.take_error()
    assert outcome.take_error() is None


def test_an_error_that_was_taken_is_not_referenced_any_more(
    outcome: Outcome, no_gc: None
) -> None:
    refs = []
    for position in (3, 4):
        error = RunError()
        refs.append(weakref.ref(error))
        outcome.fail(position, error)
        del error
    outcome.take_error()
    assert [ref() for ref in refs] == [None, None]


def test_no_task_may_start_after_cancel(outcome: Outcome) -> None:
    outcome.cancel()
    assert outcome.failed_at < 0


def test_a_failure_after_cancel_lets_nothing_start(outcome: Outcome) -> None:
    outcome.cancel()
    outcome.fail(3, ValueError())
    assert outcome.failed_at < 0


def test_cancel_is_no_error(outcome: Outcome) -> None:
    outcome.cancel()
    assert outcome.take_error() is None


def test_wait_returns_when_every_task_is_settled(outcome: Outcome) -> None:
    over = threading.Event()

    def wait() -> None:
        outcome.wait()
        over.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    for _ in range(5):
        outcome.settle()
    assert not over.is_set()
    outcome.settle()
    assert over.wait(TIMEOUT)
    waiter.join(TIMEOUT)


def test_a_failure_does_not_end_the_waiting(outcome: Outcome) -> None:
    outcome.fail(0, ValueError())
    waiter = threading.Thread(target=outcome.wait, daemon=True)
    waiter.start()
    assert waiter.is_alive()
    for _ in range(6):
        outcome.settle()
    waiter.join(TIMEOUT)
    assert not waiter.is_alive()


def test_settling_more_often_than_there_are_tasks_is_a_bug(outcome: Outcome) -> None:
    for _ in range(6):
        outcome.settle()
    with pytest.raises(AssertionError):
        outcome.settle()


def test_many_threads_may_fail_at_once() -> None:
    outcome = Outcome(plan_call(100, 1, (0,)))
    at_once = threading.Barrier(4)

    def fail(first: int) -> None:
        at_once.wait(TIMEOUT)
        for position in range(first, 100, 4):
            outcome.fail(position, ValueError(position))

    threads = [threading.Thread(target=fail, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    error = outcome.take_error()
    assert error is not None and error.args == (0,)


def test_the_mark_of_a_missing_output_differs_from_every_output() -> None:
    assert NOT_RUN is not None and repr(NOT_RUN)


def test_the_repr_says_how_far_it_is(outcome: Outcome) -> None:
    before = repr(outcome)
    outcome.fail(3, ValueError())
    failed = repr(outcome)
    for _ in range(6):
        outcome.settle()
    assert [before, failed, repr(outcome)] == [
        "<Outcome of m=3 n=2, running>",
        "<Outcome of m=3 n=2, running, failed at 3>",
        "<Outcome of m=3 n=2, settled, failed at 3>",
    ]
