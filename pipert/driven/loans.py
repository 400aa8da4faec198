"""Loans: a worker lends a turn and waits, a driver takes it and gives it back.

Who hands over waits from then on, so its core is free in a moment. The operating system does not
know that. It wakes a thread on the core on which it was last, busy or not, and moves it after
milliseconds if that one has other work: where there are as many workers as cores, two threads of a
pipe share one core meanwhile, and the other idles. So on Linux who is handed something is bound to
the core of who hands over before it is woken, and the first thing that it does is to allow itself
all cores of its worker again. Nothing of the user's runs while it is bound.
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
        binds: whether threads are bound to the core of who wakes them, until they are awake.
    """

    def __init__(self, n: int, binds: bool) -> None:
        self._binds = binds
        self._pid = os.getpid()
        self._lent: SimpleQueue[Stage | None] = SimpleQueue()
        self._returned = [_Returned() for _ in range(n)]
        self._cores: set[int] | None = None
        """Those of the worker, until a driver that it has bound allows itself them."""
        self._workers: dict[int, tuple[int, set[int]]] = {}
        """Who waits for the turn of a partition, with its cores; if threads are bound."""

    # On a worker.

    def bind(self, driver: threading.Thread) -> None:
        """Let ``driver``, which waits, go on where the current thread is. Then wake it."""
        assert driver.native_id is not None, "it has been started"
        if self._binds:
            cores = allowed()
            self._cores = cores if bind(driver.native_id) else None

    def lend(self, stage: Stage, is_lost: Callable[[], bool]) -> Value:
        """Lend the turn of a stage, and wait until it is returned.

        Args:
            stage: what the driver computes in.
            is_lost: whether nobody can return it any more.

        Returns:
            What comes with it. An error that comes with it is raised.
        """
        j, cores = stage.place.j, allowed() if self._binds else set()
        try:
            if self._binds:
                self._workers[j] = threading.get_native_id(), cores
            self._lent.put(stage)
            value, error = self._wait(self._returned[j], is_lost)
        finally:  # whatever ends it: a driver may have bound this thread
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
                return returned.get(timeout=_LOOK)
            except Empty:
                pass
            if is_lost() and returned.empty():
                raise WorkerDiedError("a driver thread was ended from outside during the call")

    # On any thread.

    def end(self) -> None:
        """Nobody lends a turn any more."""
        self._lent.put(None)

    def fail(self, j: int, error: BaseException) -> None:
        """Return the turn of partition ``j`` with an error.

        If nobody waits for it, no-op until :meth:`drop`.
        """
        self._returned[j].put(((), error))

    def drop(self) -> None:
        """Keep nothing that was returned and that nobody took."""
        for returned in self._returned:
            while not returned.empty():
                returned.get()

    # On a driver.

    def give_back(self, j: int, value: Value, tell: Callable[[], None] | None = None) -> None:
        """Return the turn of partition ``j``. The driver is about to wait, or to end.

        Args:
            j: the partition.
            value: what comes with it.
            tell: lets the next worker know, which may bind this thread to another core then.
        """
        waiting = self._workers.get(j)
        if waiting is not None and os.getpid() == self._pid:
            worker, cores = waiting
            bind(worker)
            if j not in self._workers:  # it waits no more
                allow(cores, worker)
        if tell is not None:
            tell()
        self._returned[j].put((value, None))

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

    def allowed() -> set[int]:
        """All that the current thread may use."""
        return os.sched_getaffinity(0)

    def bind(thread: int) -> bool:
        """Bind a thread, which waits, to the core of the current one, and return whether it is.

        It is not if it has ended, or a sandbox forbids it.
        """
        try:
            os.sched_setaffinity(thread, (_core(),))
        except OSError:
            return False
        return True

    def allow(cores: set[int], thread: int = 0) -> None:
        """Let a thread run on these cores; by default the current one."""
        try:
            os.sched_setaffinity(thread, cores)
        except OSError:  # they were taken from the process, or the thread has ended
            pass

else:

    def allowed() -> set[int]:
        """Nobody knows that here."""
        return set()

    def bind(thread: int) -> bool:
        """Nobody can do that here."""
        return False

    def allow(cores: set[int], thread: int = 0) -> None:
        """Nobody is bound here."""
