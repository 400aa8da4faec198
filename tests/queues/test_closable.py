"""Tests Q1 to Q3: no item is lost, no thread is left waiting, any thread may close the queue.

A finalizer that interrupts ``put`` or ``get`` is not left to chance: a trace function runs it
between each pair of the queue's bytecodes in turn.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from pipert.queues.closable import ClosableQueue
from tests.helpers.queue_waits import watch

WAIT = 10.0  # s; what should happen at once is given up after it


@pytest.fixture
def switching() -> Iterator[None]:
    """Makes threads switch about as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads), "a thread is blocked for ever"


def test_items_are_received_in_order_and_what_is_left_is_returned_once() -> None:
    queue: ClosableQueue[int] = ClosableQueue()
    assert [queue.put(item) for item in range(4)] == 4 * [[]]
    assert [queue.get(), next(iter(queue)), queue.depth()] == [0, 1, 2]
    queue.close()
    assert queue.drain() == [2, 3] and queue.drain() == [] and queue.depth() == 0


def test_a_received_item_is_not_referenced_any_more(no_gc: None) -> None:
    class Item:
        pass

    queue: ClosableQueue[Item] = ClosableQueue()
    item = Item()
    dead = weakref.ref(item)
    queue.put(item)
    del item
    queue.get()
    assert dead() is None


# Q1


@pytest.mark.parametrize("closers", [1, 3])
@pytest.mark.parametrize("items", [3, 300])
@pytest.mark.usefixtures("switching")
def test_each_item_of_many_threads_is_accounted_for_exactly_once(items: int, closers: int) -> None:
    queue: ClosableQueue[int] = ClosableQueue()
    found: list[int] = []  # list.append and list.extend are atomic
    putters = 3
    together = threading.Barrier(putters + 1 + closers)
    close_now = threading.Event()

    def put(first: int) -> None:
        together.wait(WAIT)
        for item in range(first, first + items):
            if item % items == items // 2:
                close_now.set()
            found.extend(queue.put(item))

    def receive() -> None:
        together.wait(WAIT)
        for item in queue:
            found.append(item)

    def close() -> None:
        together.wait(WAIT)
        close_now.wait(WAIT)
        found.extend(queue.drain())

    threads = [start(partial(put, k * items)) for k in range(putters)]
    join([*threads, start(receive), *[start(close) for _ in range(closers)]])
    assert sorted(found) == list(range(putters * items))


# Q2


@pytest.mark.parametrize("end", [ClosableQueue.close, ClosableQueue.drain])
def test_who_waits_is_woken_whatever_is_drained_meanwhile(end: Callable[..., object]) -> None:
    queue: ClosableQueue[int] = ClosableQueue()
    waiting = threading.Event()
    watch(queue, waiting.set)
    thread = start(lambda: list(queue))
    assert waiting.wait(WAIT)
    end(queue)
    queue.put(1)
    join([thread])
    assert queue.get() is None


# Q3


def between_bytecodes(k: int, action: Callable[[], object]) -> Callable[[], bool]:
    """Run ``action`` before the k-th bytecode that this thread executes in methods of the queue.

    Returns a function that stops this and says whether ``action`` has run.
    """
    count = -1
    old = sys.gettrace()
    of_queue = {getattr(ClosableQueue, name).__code__ for name in ("put", "get", "drain")}

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
            if count == k:
                sys.settrace(None)
                frame.f_trace = None
                action()
                return None
        return local

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code not in of_queue:
            return None
        frame.f_trace = local  # before: else there are no opcodes from Python 3.12 on
        frame.f_trace_opcodes = True
        return local

    def stop() -> bool:
        sys.settrace(old)
        return count >= k

    sys.settrace(trace)
    return stop


@pytest.mark.parametrize("end", ["close", "drain"])
@pytest.mark.parametrize("inside", ["put", "get", "drain"])
def test_a_finalizer_may_close_the_queue_its_thread_is_inside_of(inside: str, end: str) -> None:
    for k in range(200):
        queue: ClosableQueue[int] = ClosableQueue()
        queue.put(1)
        found: list[Any] = []
        stop = between_bytecodes(k, lambda: found.append(getattr(queue, end)()))  # noqa: B023
        returned = queue.put(2) if inside == "put" else getattr(queue, inside)()
        has_run = stop()
        if isinstance(returned, int):
            returned = [returned]
        accounted = [*(returned or ()), *(found[0] or () if found else ()), *queue.drain()]
        assert sorted(accounted) == ([1, 2] if inside == "put" else [1]), f"at bytecode {k}"
        assert queue.get() is None
        if not has_run:
            break
    assert k > 5, "no bytecode was interrupted"


def test_the_garbage_collector_may_close_the_queue_that_its_thread_is_about_to_wait_on() -> None:
    class Owner:
        def __init__(self, queue: ClosableQueue[int]) -> None:
            self.queue = queue
            self.itself = self

        def __del__(self) -> None:
            self.queue.close()

    queue: ClosableQueue[int] = ClosableQueue()
    Owner(queue)
    watch(queue, gc.collect)
    assert queue.get() is None
