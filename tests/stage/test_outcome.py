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


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_error_at_the_first_position_is_raised_in_whatever_order_they_come(
    outcome: Outcome, order: tuple[int, ...]
) -> None:
    errors = {position: ValueError(position) for position in order}
    for position in order:
        outcome.fail(position, errors[position])
    assert outcome.take_error() is errors[2]


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
