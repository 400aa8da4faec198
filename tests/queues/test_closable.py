"""Tests Q1 to Q3: no item is lost, no thread is left waiting, any thread may close the queue.

A finalizer that interrupts ``put``, ``get`` or ``close`` is not left to
chance: a trace function runs it between each pair of the queue's bytecodes in turn.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

import pytest

from pipert.queues.closable import ClosableQueue, Once, QueueClosed
from tests.faults.places import places
from tests.settling import settle
from tests.wakeups import watch

WAIT = 10.0  # s; what should happen at once is given up after it


@pytest.fixture
def switching() -> Iterator[None]:
    """Makes threads switch about as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def start(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads), "a thread is blocked for ever"


# Items


def test_a_received_item_is_not_referenced_any_more() -> None:
    class Item:
        pass

    queue: ClosableQueue[Item] = ClosableQueue()
    item = Item()
    dead = weakref.ref(item)
    queue.put(item)
    gc.disable()
    try:
        del item
        queue.get()
        assert dead() is None
    finally:
        gc.enable()


# Q1


@pytest.mark.parametrize("closers", [1, 3])
@pytest.mark.parametrize("items", [3, 300])
@pytest.mark.usefixtures("switching")
def test_each_item_of_many_threads_is_accounted_for_exactly_once(items: int, closers: int) -> None:
    queue: ClosableQueue[int] = ClosableQueue()
    received: list[int] = []  # list.append and list.extend are atomic
    refused: list[int] = []
    returned: list[int] = []
    putters = getters = 3
    together = threading.Barrier(putters + getters + closers)
    close_now = threading.Event()

    def put(first: int) -> None:
        together.wait(WAIT)
        for item in range(first, first + items):
            if item % items == items // 2:
                close_now.set()
            try:
                queue.put(item)
            except QueueClosed:
                refused.append(item)

    def get() -> None:
        together.wait(WAIT)
        while True:
            try:
                received.append(queue.get())
            except QueueClosed:
                return

    def close() -> None:
        together.wait(WAIT)
        close_now.wait(WAIT)
        returned.extend(queue.close())

    threads = [start(partial(put, k * items)) for k in range(putters)]
    threads += [start(get) for _ in range(getters)] + [start(close) for _ in range(closers)]
    join(threads)
    assert sorted(received + refused + returned) == list(range(putters * items))


@functools.cache
def anywhere(code: CodeType) -> set[int]:
    """Every bytecode: finalizers run whenever a reference is dropped or memory is asked for."""
    return {instruction.offset for instruction in dis.get_instructions(code)}


def between_bytecodes(
    k: int,
    code: set[CodeType],
    action: Callable[[], None],
    of: Callable[[CodeType], set[int]] = anywhere,
) -> Callable[[], bool]:
    """Run ``action`` before the k-th bytecode in ``of`` that this thread executes in ``code``.

    Returns a function that stops this and says whether ``action`` has run.
    """
    count = -1
    old = sys.gettrace()

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "opcode" and frame.f_lasti in of(frame.f_code):
            count += 1
            if count == k:
                sys.settrace(None)
                frame.f_trace = None
                action()
                return None
        return local

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code not in code:
            return None
        frame.f_trace = local  # before: else there are no opcodes from Python 3.12 on
        frame.f_trace_opcodes = True
        return local

    def stop() -> bool:
        sys.settrace(old)
        return count >= k

    sys.settrace(trace)
    return stop


PUT = {ClosableQueue.put.__code__, Once.take.__code__}
GET = {ClosableQueue.get.__code__, Once.take.__code__}
CLOSE = {ClosableQueue.close.__code__, Once.take.__code__}


@pytest.mark.parametrize("way", ["put while", "received while", "put during", "received during"])
def test_an_item_is_accounted_for_once_at_each_place_of_a_close(way: str) -> None:
    """A finalizer closes the queue within ``put`` or ``get``, or calls these within ``close``."""
    puts, closes_inside = way.startswith("put"), way.endswith("while")
    for k in range(200):
        queue: ClosableQueue[int] = ClosableQueue()
        outcome: list[str] = []

        def act() -> None:
            try:
                if puts:  # noqa: B023
                    queue.put(1)  # noqa: B023
                elif queue.get() == 1:  # noqa: B023
                    outcome.append("received")  # noqa: B023
            except QueueClosed:
                outcome.extend(["refused"] * puts)  # noqa: B023

        def close() -> None:
            outcome.extend(["returned"] * queue.close().count(1))  # noqa: B023

        if not puts:
            if not closes_inside:  # where another thread would wait, this one puts its own item
                watch(queue, partial(queue.put, 2))
            queue.put(1)
        inside = (PUT if puts else GET) if closes_inside else CLOSE
        stop = between_bytecodes(k, inside, close if closes_inside else act)
        (act if closes_inside else close)()
        if not stop():
            break
        assert len(outcome) == 1, f"at bytecode {k}: {outcome}"
    assert k > 10, "no bytecode was interrupted"


def test_an_interrupted_put_does_not_make_later_items_wait_for_others() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def wait() -> None:
        raise AssertionError(f"at place {k}: waits although there is an item")

    for k in range(200):
        queue: ClosableQueue[int] = ClosableQueue()
        stop = between_bytecodes(k, PUT, interrupt, places)
        try:
            queue.put(1)
        except KeyboardInterrupt:
            pass
        if not stop():
            break
        queue.put(2)
        while queue.get() != 2:
            pass
    assert k > 2, "nothing was interrupted"


# Q2


def test_close_wakes_every_thread_that_waits() -> None:
    queue: ClosableQueue[int] = ClosableQueue()
    waiting = threading.Semaphore(0)
    woken: list[bool] = []

    def get() -> None:
        with pytest.raises(QueueClosed):
            queue.get()
        woken.append(True)

    watch(queue, waiting.release)
    threads = [start(get) for _ in range(4)]
    for _ in threads:
        assert waiting.acquire(timeout=WAIT)
    queue.close()
    join(threads)
    assert len(woken) == 4


def test_threads_that_wait_after_close_are_woken_too() -> None:
    queue: ClosableQueue[int] = ClosableQueue()
    queue.close()
    for _ in range(3):
        with pytest.raises(QueueClosed):
            queue.get()


# Q3


def test_a_finalizer_on_another_thread_may_close_the_queue() -> None:
    class Owner:
        def __init__(self, queue: ClosableQueue[int]) -> None:
            self.queue = queue

        def __del__(self) -> None:
            self.queue.close()

    queue: ClosableQueue[int] = ClosableQueue()
    waiting = threading.Event()
    owners = [Owner(queue)]

    def drop() -> None:
        waiting.wait(WAIT)
        owners.clear()
        settle()

    watch(queue, waiting.set)
    thread = start(drop)
    with pytest.raises(QueueClosed):
        queue.get()
    join([thread])


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
    with pytest.raises(QueueClosed):
        queue.get()


@pytest.mark.parametrize("inside", ["put", "get"])
def test_a_finalizer_may_close_the_queue_its_thread_is_inside_of(inside: str) -> None:
    class Owner:
        pass

    for k in range(200):
        queue: ClosableQueue[int] = ClosableQueue()
        queue.put(1)
        owners = [Owner()]
        weakref.finalize(owners[0], queue.close)
        stop = between_bytecodes(k, PUT if inside == "put" else GET, owners.clear)
        try:
            queue.put(2) if inside == "put" else queue.get()
        except QueueClosed:
            pass
        if not stop():
            break
        with pytest.raises(QueueClosed):
            queue.get()
    assert k > 10, "no bytecode was interrupted"
