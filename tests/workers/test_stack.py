"""Tests finding out where another thread is in Python."""

from __future__ import annotations

import threading

from pipert.workers.pool import stack_of


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
