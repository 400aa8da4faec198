"""Tells when a thread is about to wait for an item of a queue."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from pipert.queues.closable import ClosableQueue

__all__ = ["watch"]


class _Items(SimpleQueue[Any]):
    def __init__(self, before_waiting: Callable[[], object]) -> None:
        super().__init__()
        self._before_waiting = before_waiting

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._before_waiting()
        return super().get(block, timeout)


def watch(queue: ClosableQueue[Any], before_waiting: Callable[[], object]) -> None:
    """Calls ``before_waiting`` on each thread that is about to wait for an item.

    Called before any thread uses the queue.
    """
    assert not queue.depth() and not queue.closed
    queue._items = _Items(before_waiting)
