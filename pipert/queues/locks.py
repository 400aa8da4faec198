"""A latch, which opens once all expected parties have arrived, and a lock of process-wide state.

Guarantees of a latch: ``wait`` returns only after ``parties`` calls of ``arrive``; ``arrive`` never
blocks and may be called from any thread; ``wait`` on the main thread can be interrupted by a signal
handler that raises, and may then be called again.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Latch:
    """A gate that opens at the ``parties``-th :meth:`arrive`; at once if ``parties`` is 0."""

    __slots__ = ("_arrivals", "_gate", "_open", "_parties")

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._arrivals = itertools.count(1)  # its next() is atomic
        self._open = parties == 0
        self._gate = threading.Lock()  # wakes the waiter; the state is _open
        if parties > 0:
            self._gate.acquire()

    def arrive(self) -> None:
        """Count one arrival; the last opens the gate. More than ``parties`` are a bug."""
        arrival = next(self._arrivals)
        assert arrival <= self._parties, "more arrivals than parties"
        if arrival == self._parties:
            self._open = True
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Block at most ``timeout`` seconds until the gate is open; return whether it is.

        One thread may wait at a time. If it is interrupted while it holds the lock, the lock stays
        locked, which is harmless: the gate is open by then.
        """
        if not self._open and self._gate.acquire(timeout=-1 if timeout is None else timeout):
            self._gate.release()
        return self._open

    def is_open(self) -> bool:
        """Return whether all parties have arrived."""
        return self._open


_Make = Callable[[], AbstractContextManager[bool]]


class ProcessLock:
    """A lock that is created once, at import. Hold it by ``with lock.current``.

    The thread that held it during a fork does not exist in the child, so the child gets a new
    lock. The ``with`` statement releases the lock that it acquired.

    Args:
        reentrant: whether the holding thread may acquire it again, as a signal handler does.
    """

    __slots__ = ("_make", "current")

    def __init__(self, reentrant: bool = False) -> None:
        self._make: _Make = threading.RLock if reentrant else threading.Lock
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.current = self._make()
