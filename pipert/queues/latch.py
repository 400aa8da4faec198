"""Opens a gate once, when all expected parties have arrived.

Guarantees: ``wait`` returns only after ``parties`` calls of ``arrive``; ``arrive`` never blocks and
may be called from any thread; ``wait`` on the main thread can be interrupted by a signal handler
that raises, and may then be called again.
"""

from __future__ import annotations

import itertools
import threading


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
