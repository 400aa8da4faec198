"""Driver threads: each holds the stack of one micro-batch that is in the middle of a ``forward``.

A driver does not run by itself. It goes on only while a worker lends it its turn, and waits
otherwise, so there is no more at work than there are workers. Threads are made when they are
needed, as many as there are micro-batches in flight, and reused.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref

import torch

from pipert.driven.passage import Passage
from pipert.errors import PipeClosedError
from pipert.queues.closable import QueueClosed
from pipert.queues.process_lock import ProcessLock
from pipert.workers.activity import Activity
from pipert.workers.worker import WorkerThread

__all__: list[str] = []


class Driver(WorkerThread):
    """A thread that takes one passage after the other."""

    def __init__(self, number: int) -> None:
        name = f"pipert-driver-{number}"
        super().__init__(name, torch.device("cpu"), threading.RLock(), Activity())
        self.passage: Passage | None = None

    def stop(self) -> None:
        """Let it end; in the middle of a passage, when that comes to wait. From anywhere."""
        super().stop()
        passage = self.passage
        if passage is not None:
            passage.unwind()


class Drivers:
    """The driver threads of one pipe. They end with it, or when it is closed."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._threads: list[Driver] = []
        self._idle: list[Driver] = []
        self._numbers = itertools.count()
        self._stopped: list[bool] = []
        # Not a method of this object: a finalizer must not keep what it waits for.
        weakref.finalize(self, _stop, self._stopped, self._threads).atexit = False
        self._pid = os.getpid()  # last: who sees it does not wait

    def start(self, passage: Passage) -> None:
        """Let a thread take ``passage``, one that is idle if there is one. Any thread."""
        if self._pid != os.getpid():
            with _resetting.current:
                if self._pid != os.getpid():
                    self._reset()  # a forked child has none of its parent's threads
        try:
            while passage.driver is None:
                self._give(passage, self._idle_one() or self._new_one())
        except BaseException as error:
            passage.abandon(error)
            raise

    def _give(self, passage: Passage, driver: Driver) -> None:
        passage.driver, driver.passage = driver, passage
        try:
            passage.wake(driver)
        except QueueClosed:
            passage.driver = driver.passage = None
            if self._stopped:
                raise PipeClosedError("the pipe was closed during the call") from None

    def _idle_one(self) -> Driver | None:
        while self._idle:
            try:
                driver = self._idle.pop()  # atomic, so it is this caller's
            except IndexError:
                break
            if driver.serves():
                return driver
        return None

    def _new_one(self) -> Driver:
        for old in list(self._threads):
            if old.in_queue.is_closed() and not old.is_alive() and old in self._threads:
                self._threads.remove(old)
        driver = Driver(next(self._numbers))
        self._threads.append(driver)  # first: nothing else would stop it
        driver.start()
        if self._stopped:
            driver.stop()
        return driver

    def rests(self, passage: Passage) -> None:
        """Take the thread of a passage back, which is over."""
        driver = passage.driver
        if not isinstance(driver, Driver):
            return
        driver.passage = None
        if passage.was_broken_off:
            driver.stop()
        else:
            self._idle.append(driver)

    def stop(self) -> None:
        """Let all threads end; those that are at work, when they are done."""
        _stop(self._stopped, self._threads)

    def join(self, timeout: float | None = None) -> None:
        """Wait until those that were stopped have ended, but for one that calls this."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in list(self._threads) if self._pid == os.getpid() else ():
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def __repr__(self) -> str:
        return f"<Drivers: {len(self._threads)} threads, {len(self._idle)} of them idle>"


_resetting = ProcessLock(reentrant=True)


def _stop(stopped: list[bool], drivers: list[Driver]) -> None:
    stopped.append(True)
    for driver in list(drivers):
        driver.stop()
