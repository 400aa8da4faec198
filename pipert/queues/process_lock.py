"""A lock for state of the whole process, which a forked child finds free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

__all__: list[str] = []


class Lock(Protocol):
    """What the locks of ``threading`` have in common."""

    def __enter__(self) -> bool: ...
    def __exit__(self, *exc_info: Any) -> None: ...


class ProcessLock:
    """Made once, at import. Hold it by ``with lock.current``.

    Whoever held it when the process forked is not there in the child, which gets a new one. The
    ``with`` statement releases the one that it took.

    Args:
        reentrant: whether the thread that holds it may take it again, as a signal handler does.
    """

    __slots__ = ("_make", "current")

    def __init__(self, reentrant: bool = False) -> None:
        self._make: Callable[[], Lock] = threading.RLock if reentrant else threading.Lock
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.current = self._make()

    def __repr__(self) -> str:
        return f"<ProcessLock {self.current!r}>"
