"""Tells when a thread is about to wait for an item of a queue."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from pipert.queues.closable import ClosableQueue

__all__ = ["watch"]


class _Wakeups(SimpleQueue[None]):
    def __init__(self, before_waiting: Callable[[], object]) -> None:
        super().__init__()
        self._before_waiting = before_waiting

    def get(self, block: bool = True, timeout: float | None = None) -> None:
        self._before_waiting()
        super().get(block, timeout)


def watch(queue: ClosableQueue[Any], before_waiting: Callable[[], object]) -> None:
    """Calls ``before_waiting`` on each thread that is about to wait for an item.

    Called before any thread uses the queue.
    """
    assert not queue.depth() and not queue.is_closed()
    queue._wakeups = _Wakeups(before_waiting)
