"""Progress: which failure counts, which tasks may start, and when a run is over."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator

import pytest

from pipert.schedules.clock_cycle import Schedule
from pipert.stage.outcome import NOT_RUN, Progress

TIMEOUT = 3.0  # s
SCHEDULE = Schedule(m=3, n=2)
ORDERS = list(itertools.permutations([2, 5, 7]))


@pytest.fixture
def progress() -> Progress:
    return Progress(SCHEDULE)


class RunError(Exception):
    """Unlike the built-in ones it can be referenced weakly."""


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_any_position_may_start_at_first(progress: Progress) -> None:
    assert all(SCHEDULE.position(i, j) < progress.failed_at for i, j in SCHEDULE)


def test_a_run_without_failures_has_no_error(progress: Progress) -> None:
    assert progress.take_error() is None


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_error_at_the_first_position_is_raised_in_whatever_order_they_come(
    progress: Progress, order: tuple[int, ...]
) -> None:
    errors = {position: ValueError(position) for position in order}
    for position in order:
        progress.fail(position, errors[position])
    assert progress.take_error() is errors[2]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_first_failed_position_is_kept_in_whatever_order_they_come(
    progress: Progress, order: tuple[int, ...]
) -> None:
    for position in order:
        progress.fail(position, ValueError())
    assert progress.failed_at == 2


def test_of_two_errors_at_one_position_the_first_to_come_is_kept(progress: Progress) -> None:
    first = ValueError()
    progress.fail(3, first)
    progress.fail(3, KeyError())
    assert progress.take_error() is first


def test_an_error_is_taken_once(progress: Progress) -> None:
    progress.fail(3, ValueError())
    progress.take_error()
    assert progress.take_error() is None


def test_an_error_that_was_taken_is_not_referenced_any_more(
    progress: Progress, no_gc: None
) -> None:
    refs = []
    for position in (3, 4):
        error = RunError()
        refs.append(weakref.ref(error))
        progress.fail(position, error)
        del error
    progress.take_error()
    assert [ref() for ref in refs] == [None, None]


def test_after_cancel_nothing_may_start(progress: Progress) -> None:
    progress.cancel()
    assert progress.failed_at < SCHEDULE.position(0, 0)


def test_a_failure_after_cancel_lets_nothing_start(progress: Progress) -> None:
    progress.cancel()
    progress.fail(3, ValueError())
    assert progress.failed_at < SCHEDULE.position(0, 0)


def test_cancel_is_no_error(progress: Progress) -> None:
    progress.cancel()
    assert progress.take_error() is None


def test_wait_returns_when_every_task_is_settled(progress: Progress) -> None:
    over = threading.Event()

    def wait() -> None:
        progress.wait()
        over.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    for _ in range(5):
        progress.settle()
    assert not over.is_set()
    progress.settle()
    assert over.wait(TIMEOUT)
    waiter.join(TIMEOUT)


def test_a_failure_does_not_end_the_waiting(progress: Progress) -> None:
    progress.fail(0, ValueError())
    waiter = threading.Thread(target=progress.wait, daemon=True)
    waiter.start()
    assert waiter.is_alive()
    for _ in range(6):
        progress.settle()
    waiter.join(TIMEOUT)
    assert not waiter.is_alive()


def test_to_settle_more_often_than_there_are_tasks_is_a_bug(progress: Progress) -> None:
    for _ in range(6):
        progress.settle()
    with pytest.raises(AssertionError):
        progress.settle()


def test_many_threads_may_fail_at_once() -> None:
    progress = Progress(Schedule(m=100, n=1))
    at_once = threading.Barrier(4)

    def fail(first: int) -> None:
        at_once.wait(TIMEOUT)
        for position in range(first, 100, 4):
            progress.fail(position, ValueError(position))

    threads = [threading.Thread(target=fail, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    error = progress.take_error()
    assert error is not None and error.args == (0,)


def test_what_is_sent_instead_of_an_output_can_be_told_from_every_output() -> None:
    assert NOT_RUN is not None and repr(NOT_RUN)


def test_the_repr_says_how_far_it_is(progress: Progress) -> None:
    before = repr(progress)
    progress.fail(3, ValueError())
    failed = repr(progress)
    for _ in range(6):
        progress.settle()
    assert [before, failed, repr(progress)] == [
        "<Progress of m=3 n=2, running>",
        "<Progress of m=3 n=2, running, failed at 3>",
        "<Progress of m=3 n=2, settled, failed at 3>",
    ]
