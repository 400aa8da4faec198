"""Loans: a worker lends its turn to a driver and waits; the driver computes and returns the turn.

A thread that hands over a turn is about to wait, so its core is about to be free. The operating
system does not know that: it wakes the other thread on the core where it last ran, busy or not, and
moves it only after milliseconds. If there are as many workers as cores, two threads of a pipe share
one core meanwhile, and another core idles. So on Linux a thread is bound to the core of the thread
that wakes it, and the first thing it does is to allow itself all of its worker's cores again. No
user code runs while a thread is bound.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from pipert._typing import Value
from pipert.errors import WorkerDiedError
from pipert.stage.stage import Stage

__all__: list[str] = []

POLL = 0.5  # s; how often a thread that waits for a driver checks that it is alive


class _Sent(enum.Enum):
    SENT = "sent"


SENT = _Sent.SENT
"""Returned with a turn in place of a value, when the driver itself has told the next stage."""

_Answer = tuple[Value, BaseException | None]
_Returned = SimpleQueue[_Answer]


class Loans:
    """The loans of one micro-batch's turns.

    A driver may return one turn and be lent the next before the worker of the first has noticed,
    so each partition has a queue of its own for returned turns.

    Args:
        n: the number of partitions.
        binds: whether a thread is bound to the core of the thread that wakes it, until it is awake.
    """

    def __init__(self, n: int, binds: bool) -> None:
        self._binds = binds
        self._pid = os.getpid()
        self._lent: SimpleQueue[Stage | None] = SimpleQueue()
        self._returned = [_Returned() for _ in range(n)]
        self._cores: set[int] | None = None
        """The cores of the worker that has bound the driver, which is to allow itself these."""
        self._workers: dict[int, tuple[int, set[int]]] = {}
        """If threads are bound: the worker that waits for each turn, and its cores."""

    # On a worker.

    def bind(self, driver: threading.Thread) -> None:
        """Bind ``driver``, which waits and is about to be woken, to the current thread's core."""
        assert driver.native_id is not None, "it has been started"
        if self._binds:
            cores = allowed_cores()
            self._cores = cores if bind(driver.native_id) else None

    def lend(self, stage: Stage, is_lost: Callable[[], bool]) -> Value:
        """Lend the turn of ``stage``, and wait until it is returned.

        Args:
            stage: the stage whose turn it is.
            is_lost: tells whether the turn can no longer be returned.

        Returns:
            The value that the turn is returned with. An error that it is returned with is raised.
        """
        j, cores = stage.place.j, allowed_cores() if self._binds else set()
        try:
            if self._binds:
                self._workers[j] = threading.get_native_id(), cores
            self._lent.put(stage)
            value, error = self._wait(self._returned[j], is_lost)
        finally:  # even after an error: a driver may have bound this thread
            if self._workers.pop(j, None) is not None:
                allow(cores)
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait(self, returned: _Returned, is_lost: Callable[[], bool]) -> _Answer:
        while True:
            try:
                return returned.get(timeout=POLL)
            except Empty:
                pass
            if is_lost() and returned.empty():
                raise WorkerDiedError("a driver thread was ended from outside during the call")

    # On any thread.

    def end(self) -> None:
        """Tell the driver that no further turn will be lent."""
        self._lent.put(None)

    def fail(self, j: int, error: BaseException) -> None:
        """Return the turn of partition ``j`` with an error, which is kept if no worker waits."""
        self._returned[j].put(((), error))

    def drop(self) -> None:
        """Discard what was returned and never received."""
        for returned in self._returned:
            while not returned.empty():
                returned.get()

    # On a driver.

    def give_back(self, j: int, value: Value, tell: Callable[[], None] | None = None) -> None:
        """Return the turn of partition ``j``. The driver waits or ends right afterwards.

        Args:
            j: the partition.
            value: returned with the turn.
            tell: tells the next worker, which may then bind this thread to another core.
        """
        waiting = self._workers.get(j)
        if waiting is not None and os.getpid() == self._pid:
            worker, cores = waiting
            bind(worker)
            if j not in self._workers:  # the worker has stopped waiting meanwhile
                allow(cores, worker)
        if tell is not None:
            tell()
        self._returned[j].put((value, None))

    def take(self) -> Stage | None:
        """Wait for the next turn, and return its stage; ``None`` if there will be none."""
        stage = self._lent.get()
        if self._cores is not None:
            allow(self._cores)
            self._cores = None
        return stage

    def __repr__(self) -> str:
        return f"<Loans, {self._lent.qsize()} not taken>"


if sys.platform == "linux":
    # PyDLL holds the interpreter lock, which is faster than releasing it.
    _core: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu

    def allowed_cores() -> set[int]:
        """Return the cores that the current thread may use."""
        return os.sched_getaffinity(0)

    def bind(thread: int) -> bool:
        """Bind a waiting thread to the core of the current one, and return whether that worked.

        It does not if the thread has ended, or a sandbox forbids it.
        """
        try:
            os.sched_setaffinity(thread, (_core(),))
        except OSError:
            return False
        return True

    def allow(cores: set[int], thread: int = 0) -> None:
        """Let a thread, by default the current one, run on ``cores``."""
        try:
            os.sched_setaffinity(thread, cores)
        except OSError:  # the process has lost these cores, or the thread has ended
            pass

else:

    def allowed_cores() -> set[int]:
        """Return no cores: this platform does not tell them."""
        return set()

    def bind(thread: int) -> bool:
        """Return ``False``: this platform cannot bind threads."""
        return False

    def allow(cores: set[int], thread: int = 0) -> None:
        """Do nothing: no thread is bound on this platform."""
