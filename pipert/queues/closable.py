"""A FIFO that can be closed from anywhere, a finalizer included.

Guarantees:

* **Q1** each item put is received once, or returned by :meth:`ClosableQueue.close`, or refused by
  the ``put`` that brought it. Never two of these, never none.
* **Q2** ``close`` wakes every waiter, now and later.
* **Q3** ``close`` may be called from a finalizer, on any thread, also on a thread that is inside
  ``put`` or ``get`` of the same queue at that moment.

Q3 rules out a lock of our own: a finalizer that runs on the thread that holds it would wait for
itself. ``SimpleQueue.put`` is documented to be reentrant, so it carries the items, and ownership of
an item is decided by one atomic operation. An item travels in a *cell*, a list of one element;
whoever empties the cell owns the item. That settles the race of ``put`` with ``close``: a put that
finds the queue closed after it has put tries to empty its own cell. If it can, the item is refused;
if it cannot, somebody received it or ``close`` returned it.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from pipert.errors import QueueClosed

__all__: list[str] = []

T = TypeVar("T")


class ClosableQueue(Generic[T]):
    """An unbounded FIFO of items of type ``T``. Any number of threads may put, get and close."""

    __slots__ = ("__weakref__", "_cells", "_closed")

    def __init__(self) -> None:
        self._cells: SimpleQueue[list[T] | None] = SimpleQueue()  # None: closed
        self._closed = False

    def put(self, item: T) -> None:
        """Append ``item``; :class:`QueueClosed` if the queue does not accept it any more."""
        if self.is_closed():
            raise QueueClosed
        cell = [item]
        self._cells.put(cell)
        if self.is_closed() and _take(cell) is not None:
            raise QueueClosed

    def get(self, before_waiting: Callable[[], None] | None = None) -> T:
        """Remove and return the oldest item; wait for one, or raise :class:`QueueClosed`.

        ``before_waiting`` is called when there is nothing yet, before the thread blocks. With
        several receivers it may be missed by the one that loses the race; it is a hint.
        """
        while True:
            if before_waiting is not None and self._cells.empty():
                before_waiting()
            cell = self._cells.get()
            if cell is None:
                self._cells.put(None)  # for the next waiter
                raise QueueClosed
            taken = _take(cell)
            if taken is not None:
                return taken[0]

    def close(self) -> list[T]:
        """Close and return what nobody had received. Again: an empty list."""
        self._closed = True
        left: list[T] = []
        while True:
            try:
                cell = self._cells.get_nowait()
            except Empty:
                break
            if cell is not None and (taken := _take(cell)) is not None:
                left.append(taken[0])
        self._cells.put(None)
        return left

    def is_closed(self) -> bool:
        """Whether :meth:`close` was called; with other threads about, only "yes" lasts."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<ClosableQueue {state}, about {self._cells.qsize()} waiting>"


def _take(cell: list[T]) -> tuple[T] | None:
    """Empty ``cell`` if nobody has; ``list.pop`` is atomic, so just one caller gets the item."""
    try:
        return (cell.pop(),)
    except IndexError:
        return None
