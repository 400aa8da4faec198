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

_Cores = set[int]
_Answer = tuple[Value, BaseException | None, _Cores | None]
"""Also the cores of the worker, if it must allow itself them."""
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
        self._lent: SimpleQueue[Stage | None] = SimpleQueue()
        self._returned = [_Returned() for _ in range(n)]
        self._cores: _Cores | None = None
        """Those of the worker, until a driver that it has bound allows itself them."""
        self._workers: dict[int, tuple[threading.Thread, _Cores]] = {}
        """Who waits for the turn of a partition, with its cores; if threads are bound."""

    # On a worker.

    def bind(self, driver: threading.Thread) -> None:
        """Let ``driver``, which waits, go on where the current thread is. Then wake it."""
        if self._binds:
            cores = allowed()
            self._cores = cores if bind(driver) else None

    def lend(self, stage: Stage) -> None:
        """Lend the turn of a stage."""
        if self._binds:
            self._workers[stage.place.j] = threading.current_thread(), allowed()
        self._lent.put(stage)

    def wait(self, j: int, is_lost: Callable[[], bool]) -> Value:
        """Wait until that of partition ``j`` is returned.

        Args:
            j: the partition.
            is_lost: whether nobody can return it any more.

        Returns:
            What comes with it. An error that comes with it is raised.
        """
        value, error, cores = self._wait(self._returned[j], is_lost)
        if cores is not None:
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
        self._returned[j].put(((), error, None))

    def drop(self) -> None:
        """Keep nothing that was returned and that nobody took."""
        for returned in self._returned:
            while not returned.empty():
                returned.get()

    # On a driver.

    def give_back(self, j: int, value: Value) -> None:
        """Return the turn of partition ``j``. The driver is about to wait, or to end."""
        worker, cores = self._workers.pop(j, (None, None))
        bound = worker is not None and bind(worker)
        self._returned[j].put((value, None, cores if bound else None))

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

    def allowed() -> _Cores:
        """All that the current thread may use."""
        return os.sched_getaffinity(0)

    def bind(thread: threading.Thread) -> bool:
        """Bind a thread, which waits, to the core of the current one, and return whether it is.

        It is not if it has ended, or a sandbox forbids it.
        """
        assert thread.native_id is not None, "it has been started"
        try:
            os.sched_setaffinity(thread.native_id, (_core(),))
        except OSError:
            return False
        return True

    def allow(cores: _Cores) -> None:
        """Let the current thread run on these cores."""
        try:
            os.sched_setaffinity(0, cores)
        except OSError:  # they were taken from the process; the system has given it others
            pass

else:

    def allowed() -> _Cores:
        """Nobody knows that here."""
        return set()

    def bind(thread: threading.Thread) -> bool:
        """Nobody can do that here."""
        return False

    def allow(cores: _Cores) -> None:
        """Nobody is bound here."""
