"""Locks process-wide state, with a lock that is always free in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

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
