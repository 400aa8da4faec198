"""Tests that the latch opens after all arrivals, and lets a signal through."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from pipert.queues.locks import Latch

WAIT = 10.0  # s; what should happen at once is given up after it


class Interrupted(Exception):
    pass


@pytest.fixture
def soon() -> Iterator[Callable[[], None]]:
    """Makes a signal arrive soon whose handler raises."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.02) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def until_inside_wait(thread: threading.Thread) -> None:
    """Waits until ``thread`` executes :meth:`Latch.wait`."""
    assert thread.ident is not None
    while sys._current_frames()[thread.ident].f_code is not Latch.wait.__code__:
        assert thread.is_alive()


def test_wait_does_not_return_before_the_last_arrival() -> None:
    latch = Latch(2)
    over: list[bool] = []

    def wait() -> None:
        latch.wait()
        over.append(last)

    last = False
    thread = start(wait)
    until_inside_wait(thread)
    latch.arrive()
    until_inside_wait(thread)
    last = True
    latch.arrive()
    thread.join(WAIT)
    assert over == [True]


def test_a_wait_that_times_out_reports_a_shut_latch() -> None:
    latch = Latch(2)
    latch.arrive()
    assert not latch.wait(timeout=0.0)


@pytest.mark.main_thread
def test_an_interrupted_wait_can_be_waited_again(soon: Callable[[], None]) -> None:
    latch = Latch(1)
    with pytest.raises(Interrupted):
        soon()
        latch.wait()
    main = threading.current_thread()

    def arrive() -> None:
        until_inside_wait(main)
        latch.arrive()

    thread = start(arrive)
    latch.wait()
    thread.join(WAIT)
    assert latch.is_open()
