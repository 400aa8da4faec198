"""A lock for state of the whole process, which a forked child finds free."""

from __future__ import annotations

import os
import threading

__all__: list[str] = []


class ProcessLock:
    """Made once, at import. Hold it by ``with lock.current``.

    Whoever held it when the process forked is not there in the child, which gets a new one. The
    ``with`` statement releases the one that it took.
    """

    __slots__ = ("current",)

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.current = threading.Lock()

    def __repr__(self) -> str:
        return f"<ProcessLock, {'held' if self.current.locked() else 'free'}>"
