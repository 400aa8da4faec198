"""Loans: a worker lends a turn and waits, a driver takes it and gives it back.

Who wakes the driver waits from then on, so its core is free in a moment. The operating system does
not know that. It wakes a thread on the core on which it was last, busy or not, and where there are
as many workers as cores, one core idles meanwhile: for a quarter of a step with two. So on Linux a
worker binds the driver to its own core before it wakes it, and the first thing that the driver does
is to allow itself all cores of its worker again. Nothing of the user's runs while it is bound, and
no worker ever is.
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

_LOOK = 0.5  # s; how often who waits for a driver looks whether it is alive


class _Sent(enum.Enum):
    SENT = "sent"


SENT = _Sent.SENT
"""Returned with a turn: the driver itself has told the next partition."""

_Answer = tuple[Value, BaseException | None]
_Returned = SimpleQueue[_Answer]


class Loans:
    """Those of the turns of one micro-batch.

    A driver may return one turn and be lent the next before the worker of the first has noticed,
    so each partition's are returned in a queue of their own.

    Args:
        n: the number of partitions.
        binds: whether drivers are bound to the core of their worker while they are woken.
    """

    def __init__(self, n: int, binds: bool) -> None:
        self._binds = binds
        self._lent: SimpleQueue[Stage | None] = SimpleQueue()
        self._returned = [_Returned() for _ in range(n)]
        self._cores: set[int] | None = None
        """Those of the worker, until a driver that it has bound allows itself them."""

    # On a worker.

    def bind(self, driver: threading.Thread) -> None:
        """Let ``driver``, which waits, go on where the current thread is. Then wake it."""
        if self._binds:
            self._cores = bind(driver)

    def lend(self, stage: Stage) -> None:
        """Lend the turn of a stage."""
        self._lent.put(stage)

    def wait(self, j: int, is_lost: Callable[[], bool]) -> Value:
        """Wait until that of partition ``j`` is returned.

        Args:
            j: the partition.
            is_lost: whether nobody can return it any more.

        Returns:
            What comes with it. An error that comes with it is raised.
        """
        value, error = self._wait(self._returned[j], is_lost)
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait(self, returned: _Returned, is_lost: Callable[[], bool]) -> _Answer:
        while True:
            try:
                return returned.get(timeout=_LOOK)
            except Empty:
                pass
            if is_lost() and returned.empty():
                raise WorkerDiedError("a driver thread was ended from outside during the call")

    # On any thread.

    def end(self) -> None:
        """Nobody lends a turn any more."""
        self._lent.put(None)

    def give_back(self, j: int, value: Value, error: BaseException | None = None) -> None:
        """Return the turn of partition ``j``. If nobody waits for it, no-op until :meth:`drop`."""
        self._returned[j].put((value, error))

    def drop(self) -> None:
        """Keep nothing that was returned and that nobody took."""
        for returned in self._returned:
            while not returned.empty():
                returned.get()

    # On a driver.

    def take(self) -> Stage | None:
        """Wait for the next turn; ``None`` if there will be none."""
        stage = self._lent.get()
        if self._cores is not None:
            allow(self._cores)
            self._cores = None
        return stage

    def __repr__(self) -> str:
        return f"<Loans, {self._lent.qsize()} not taken>"


if sys.platform == "linux":
    # With the interpreter's lock: it is faster than to release it.
    _core: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu

    def bind(thread: threading.Thread) -> set[int] | None:
        """Bind a thread to the core of the current one, and return all that this one may use.

        ``None`` if it may not be bound: it has ended, or a sandbox forbids it.
        """
        assert thread.native_id is not None, "it has been started"
        cores = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(thread.native_id, (_core(),))
        except OSError:
            return None
        return cores

    def allow(cores: set[int]) -> None:
        """Let the current thread run on these cores."""
        try:
            os.sched_setaffinity(0, cores)
        except OSError:  # they were taken from the process; the system has given it others
            pass

else:

    def bind(thread: threading.Thread) -> set[int] | None:
        """Nobody can do that here."""
        return None

    def allow(cores: set[int]) -> None:
        """Nobody is bound here."""
