"""Driver threads: each holds the stack of one micro-batch that is in the middle of a ``forward``.

A driver does not run by itself. It goes on only while a worker lends it its turn, and waits
otherwise, so there is no more at work than there are workers. Threads are made when they are
needed, as many as there are micro-batches in flight, and reused.
"""

from __future__ import annotations

import os
import threading
import time
import weakref

import torch

from pipert.workers.activity import Activity
from pipert.workers.worker import Task, WorkerThread

__all__: list[str] = []


class Drivers:
    """The driver threads of one pipe. They end with it, or when it is closed."""

    def __init__(self) -> None:
        self._reset()
        # Not a method of this object: a finalizer must not keep what it waits for.
        weakref.finalize(self, _stop, self._threads).atexit = False

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._threads: list[WorkerThread] = []
        self._idle: list[WorkerThread] = []

    def start(self, task: Task) -> WorkerThread:
        """Let a thread do ``task``, one that is idle if there is one. Any thread."""
        if self._pid != os.getpid():
            self._reset()  # a forked child has none of its parent's threads
            weakref.finalize(self, _stop, self._threads).atexit = False
        thread = self._idle_one() or self._new_one()
        thread.in_queue.put(task)
        return thread

    def _idle_one(self) -> WorkerThread | None:
        while self._idle:
            try:
                thread = self._idle.pop()  # atomic, so it is this caller's
            except IndexError:
                break
            if thread.serves():
                return thread
        return None

    def _new_one(self) -> WorkerThread:
        name = f"pipert-driver-{len(self._threads)}"
        thread = WorkerThread(name, torch.device("cpu"), threading.Lock(), Activity())
        self._threads.append(thread)
        thread.start()
        return thread

    def rests(self, thread: WorkerThread) -> None:
        """Take a thread back whose task is over."""
        self._idle.append(thread)

    def stop(self) -> None:
        """Let all threads end; those that are at work, when they are done."""
        _stop(self._threads)

    def join(self, timeout: float | None = None) -> None:
        """Wait until those that were stopped have ended, but for one that calls this."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads if self._pid == os.getpid() else ():
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def __repr__(self) -> str:
        return f"<Drivers: {len(self._threads)} threads, {len(self._idle)} of them idle>"


def _stop(threads: list[WorkerThread]) -> None:
    for thread in threads:
        thread.stop()
