"""Micro-batch threads: each holds the stack of one micro-batch whose ``forward`` is under way.

It computes only while a worker hands off a partition to it, and waits otherwise, so no more threads
compute than there are workers. They are started on demand, one for each micro-batch in flight, and
reused.
"""

from __future__ import annotations

import itertools
import os
import threading
import time

import torch

from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.errors import PipeClosedError
from pipert.queues.locks import ProcessLock
from pipert.workers.worker import Activity, WorkerThread


class MicroBatchThread(WorkerThread):
    """A thread that executes the ``forward`` of one micro-batch after another."""

    def __init__(self, number: int) -> None:
        name = f"pipert-microbatch-{number}"
        super().__init__(name, torch.device("cpu"), Activity())
        self.microbatch: MicroBatchForward | None = None

    def stop(self) -> None:
        """Stop the thread. Inside a ``forward``, it stops at its next wait. Thread-safe."""
        super().stop()
        microbatch = self.microbatch
        if microbatch is not None:
            microbatch.unwind()


class MicroBatchThreads:
    """The micro-batch threads of one pipe, which stops them when it is closed or collected."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._threads: list[MicroBatchThread] = []
        self._idle: list[MicroBatchThread] = []
        self._numbers = itertools.count()
        self._stopped = False
        self._pid = os.getpid()  # last: a thread that sees it skips the lock

    def start(self, microbatch: MicroBatchForward) -> None:
        """Hand ``microbatch`` to an idle thread, or to a new one. Thread-safe."""
        if self._pid != os.getpid():
            with _resetting.current:
                if self._pid != os.getpid():
                    self._reset()  # a forked child has none of its parent's threads
        try:
            while microbatch.thread is None:
                self._give(microbatch, self._take_idle() or self._start_new())
        except BaseException as error:
            microbatch.abandon(error)
            raise

    def _give(self, microbatch: MicroBatchForward, thread: MicroBatchThread) -> None:
        microbatch.thread, thread.microbatch = thread, microbatch
        if thread.in_queue.put(microbatch):
            microbatch.thread = thread.microbatch = None
            if self._stopped:
                raise PipeClosedError("the pipe was closed during the call")

    def _take_idle(self) -> MicroBatchThread | None:
        while self._idle:
            try:
                thread = self._idle.pop()  # atomic: no other caller gets it
            except IndexError:
                break
            if thread.serves():
                return thread
        return None

    def _start_new(self) -> MicroBatchThread:
        for old in list(self._threads):
            if old.in_queue.closed and not old.is_alive() and old in self._threads:
                self._threads.remove(old)
        thread = MicroBatchThread(next(self._numbers))
        self._threads.append(thread)  # before it starts, so that it is always stopped
        thread.start()
        if self._stopped:
            thread.stop()
        return thread

    def release(self, microbatch: MicroBatchForward) -> None:
        """Take back the thread of a micro-batch that has ended."""
        thread = microbatch.thread
        if not isinstance(thread, MicroBatchThread):
            return
        thread.microbatch = None
        if microbatch.was_broken_off:
            thread.stop()
        else:
            self._idle.append(thread)

    def stop(self) -> None:
        """Stop all threads. One that is inside a ``forward`` stops at its next wait."""
        self._stopped = True
        for thread in list(self._threads):
            thread.stop()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the stopped threads have ended, except for the calling one."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in list(self._threads) if self._pid == os.getpid() else ():
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


_resetting = ProcessLock(reentrant=True)
