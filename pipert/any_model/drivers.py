"""Driver threads: each holds the stack of one micro-batch whose ``forward`` is under way.

A driver computes only while a worker lends it its turn, and waits otherwise, so no more threads
compute than there are workers. Drivers are started on demand, one for each micro-batch in flight,
and reused.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref

import torch

from pipert.any_model.passage import Passage
from pipert.errors import PipeClosedError
from pipert.queues.closable import QueueClosed
from pipert.queues.process_lock import ProcessLock
from pipert.workers.activity import Activity
from pipert.workers.worker import WorkerThread

__all__: list[str] = []


class Driver(WorkerThread):
    """A thread that executes one passage after another."""

    def __init__(self, number: int) -> None:
        name = f"pipert-driver-{number}"
        super().__init__(name, torch.device("cpu"), Activity())
        self.passage: Passage | None = None

    def stop(self) -> None:
        """Stop the driver. Inside a passage, it stops at its next wait. Thread-safe."""
        super().stop()
        passage = self.passage
        if passage is not None:
            passage.unwind()


class Drivers:
    """The driver threads of one pipe. They end when it is closed or collected."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._threads: list[Driver] = []
        self._idle: list[Driver] = []
        self._numbers = itertools.count()
        self._stopped: list[bool] = []
        # Not a method of this object: a finalizer must not keep the object alive.
        weakref.finalize(self, _stop, self._stopped, self._threads).atexit = False
        self._pid = os.getpid()  # last: a thread that sees it skips the lock

    def start(self, passage: Passage) -> None:
        """Hand ``passage`` to an idle driver, or to a new one. Thread-safe."""
        if self._pid != os.getpid():
            with _resetting.current:
                if self._pid != os.getpid():
                    self._reset()  # a forked child has none of its parent's threads
        try:
            while passage.driver is None:
                self._give(passage, self._take_idle() or self._start_new())
        except BaseException as error:
            passage.abandon(error)
            raise

    def _give(self, passage: Passage, driver: Driver) -> None:
        passage.driver, driver.passage = driver, passage
        try:
            driver.in_queue.put(passage)
        except QueueClosed:
            passage.driver = driver.passage = None
            if self._stopped:
                raise PipeClosedError("the pipe was closed during the call") from None

    def _take_idle(self) -> Driver | None:
        while self._idle:
            try:
                driver = self._idle.pop()  # atomic: no other caller gets it
            except IndexError:
                break
            if driver.serves():
                return driver
        return None

    def _start_new(self) -> Driver:
        for old in list(self._threads):
            if old.in_queue.is_closed() and not old.is_alive() and old in self._threads:
                self._threads.remove(old)
        driver = Driver(next(self._numbers))
        self._threads.append(driver)  # before it starts, so that it is always stopped
        driver.start()
        if self._stopped:
            driver.stop()
        return driver

    def release(self, passage: Passage) -> None:
        """Take back the driver of a passage that has ended."""
        driver = passage.driver
        if not isinstance(driver, Driver):
            return
        driver.passage = None
        if passage.was_broken_off:
            driver.stop()
        else:
            self._idle.append(driver)

    def stop(self) -> None:
        """Stop all drivers. One that is inside a passage stops at its next wait."""
        _stop(self._stopped, self._threads)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the stopped drivers have ended, except for the calling one."""
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
