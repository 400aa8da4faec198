"""Tests finding out where another thread is in Python."""

from __future__ import annotations

import threading

import pytest

from pipert.workers.stack import stack_of


def innermost(entered: threading.Event, go_on: threading.Event) -> None:
    entered.set()
    go_on.wait()


def test_the_stack_shows_where_the_thread_is() -> None:
    entered, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=innermost, args=(entered, go_on))
    thread.start()
    entered.wait()
    calls = stack_of(thread)
    go_on.set()
    thread.join()
    names = [call.name for call in calls]
    assert names.index("run") < names.index("innermost") < names.index("wait")
    (ours,) = [call for call in calls if call.name == "innermost"]
    assert ours.filename == __file__ and ours.line == "go_on.wait()"


def test_a_thread_that_has_ended_or_not_begun_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    assert stack_of(thread) == []
    thread.start()
    thread.join()
    assert stack_of(thread) == []


def test_the_current_thread_is_in_the_function_that_asks() -> None:
    names = [call.name for call in stack_of(threading.current_thread())]
    assert "stack_of" in names
    assert names.index("test_the_current_thread_is_in_the_function_that_asks") < names.index(
        "stack_of"
    )


@pytest.mark.slow
@pytest.mark.parametrize("times", [200, pytest.param(1000, marks=pytest.mark.sweep)])
def test_a_thread_that_runs_meanwhile_does_no_harm(times: int) -> None:
    done = threading.Event()

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)

    def work() -> None:
        while not done.is_set():
            deep(20)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(times):
        stack_of(thread)
    done.set()
    thread.join()
