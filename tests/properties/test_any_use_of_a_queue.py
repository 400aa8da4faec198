"""A closable queue against a model of it: any sequence of operations, with threads that wait.

The machine runs one operation at a time and then waits until the threads it must have
woken are done. So the operations alone determine the outcome, except which of several
waiting threads gets an item. The tests of ``queues`` cover races.
"""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipert.queues.closable import ClosableQueue, QueueClosed
from tests.wakeups import watch

pytestmark = pytest.mark.slow

WAIT = 10.0  # s; what should happen at once is given up after it


class Getter(threading.Thread):
    """Gets one item, and has begun to wait for it when the constructor returns."""

    def __init__(self, queue: ClosableQueue[int], done: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self.got: list[int | None] = []  # None when it was told that the queue is closed
        self._queue = queue
        self._done = done
        self.waits = threading.Event()
        self.start()
        assert self.waits.wait(WAIT)

    def run(self) -> None:
        try:
            self.got.append(self._queue.get())
        except QueueClosed:
            self.got.append(None)
        self._done.release()


def _note_that_it_waits() -> None:
    getter = threading.current_thread()
    assert isinstance(getter, Getter)
    getter.waits.set()


class Machine(RuleBasedStateMachine):
    """The queue, and what must be in it: nothing while somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: ClosableQueue[int] = ClosableQueue()
        watch(self.queue, _note_that_it_waits)
        self.waiting: list[Getter] = []
        self.done = threading.Semaphore(0)
        self.inside: list[int] = []
        self.is_closed = False
        self.put_so_far = 0
        self.accounted: list[int] = []  # received, returned or refused

    @rule(count=st.integers(1, 3))
    def put(self, count: int) -> None:
        for item in range(self.put_so_far, self.put_so_far + count):
            self.put_so_far += 1
            try:
                self.queue.put(item)
            except QueueClosed:
                assert self.is_closed
                self.accounted.append(item)
                continue
            assert not self.is_closed
            if self.waiting:
                assert self.received() == item
            else:
                self.inside.append(item)

    @precondition(lambda self: self.inside and not self.is_closed)
    @rule()
    def get(self) -> None:
        item = self.queue.get()
        assert item == self.inside.pop(0)
        self.accounted.append(item)

    @precondition(lambda self: not self.inside and not self.is_closed and len(self.waiting) < 3)
    @rule()
    def wait(self) -> None:
        self.waiting.append(Getter(self.queue, self.done))

    @rule()
    def shut(self) -> None:
        self.queue.shut()
        self.wake_all()

    @rule()
    def close(self) -> None:
        left = self.queue.close()
        assert left == self.inside
        self.accounted += left
        self.inside.clear()
        self.wake_all()

    @precondition(lambda self: self.is_closed)
    @rule()
    def get_in_vain(self) -> None:
        with pytest.raises(QueueClosed):
            self.queue.get()

    def wake_all(self) -> None:
        self.is_closed = True
        while self.waiting:
            assert self.received() is None

    def received(self) -> int | None:
        """What the one of the waiting threads got that must be done now."""
        assert self.done.acquire(timeout=WAIT), "nobody was woken"
        ready = [getter for getter in self.waiting if getter.got]
        assert len(ready) == 1 or self.is_closed
        self.waiting.remove(ready[0])
        ready[0].join(WAIT)
        (item,) = ready[0].got
        if item is not None:
            self.accounted.append(item)
        return item

    @invariant()
    def says_whether_it_is_open(self) -> None:
        assert self.queue.is_closed() == self.is_closed

    @invariant()
    def accounts_for_each_item_once(self) -> None:
        assert sorted([*self.accounted, *self.inside]) == list(range(self.put_so_far))

    def teardown(self) -> None:
        left = self.queue.close()
        assert left == self.inside
        self.wake_all()


def test_each_item_is_received_or_returned_or_refused_whatever_is_done_with_the_queue() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=40, stateful_step_count=25)
    )
