"""A FIFO that any thread can close, even from a finalizer.

Guarantees:

* **Q1** each item put is either received once, or returned by :meth:`ClosableQueue.close`, or
  refused by its ``put``: exactly one of these.
* **Q2** ``close`` and ``shut`` wake every waiter, now and later.
* **Q3** both may be called from a finalizer, on any thread, even on a thread that is inside
  ``put`` or ``get`` of the same queue at that moment.

Q3 rules out a lock of our own: a finalizer on the thread that holds it would deadlock.
``deque`` and ``SimpleQueue.put`` are atomic and reentrant; the former holds the items, the
latter wakes waiters. An item lies in a *cell*, a list of one element, and whoever empties the cell
owns the item. That settles the race of ``put`` with ``close``: a put that finds the queue closed
afterwards tries to empty its own cell. If it succeeds, the item is refused; if not, another thread
has it.

The wake-ups that a waiter blocks on carry no item. An exception thrown into a waiting thread from
outside is raised the moment the thread wakes, and would lose whatever the blocking call returns;
this way the item stays in the queue, where ``close`` finds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

__all__: list[str] = []

T = TypeVar("T")


class QueueClosed(Exception):
    """Raised on use of a closed queue. Never leaves pipert: whoever catches it settles the task."""


class ClosableQueue(Generic[T]):
    """An unbounded FIFO of items of type ``T``. Any number of threads may put, get and close."""

    __slots__ = ("__weakref__", "_cells", "_closed", "_wakeups")

    def __init__(self) -> None:
        self._cells: deque[list[T]] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # one for each put, one for close
        self._closed = False

    def put(self, item: T) -> None:
        """Append ``item``, or raise :class:`QueueClosed` if the queue no longer accepts it."""
        if self.is_closed():
            raise QueueClosed
        cell = [item]
        self._cells.append(cell)
        self._wakeups.put(None)
        if self.is_closed() and _take(cell) is not None:
            raise QueueClosed

    def get(self, before_waiting: Callable[[], None] | None = None) -> T:
        """Remove and return the oldest item, waiting for one; or raise :class:`QueueClosed`.

        If the queue is empty, ``before_waiting`` is called before the thread blocks.
        """
        while True:
            if self.is_closed():
                raise QueueClosed
            if self._cells:
                self._use_wakeup()
            else:
                if before_waiting is not None:
                    before_waiting()
                self._wakeups.get()
            if self.is_closed():
                self._wakeups.put(None)  # for the next waiter
                raise QueueClosed
            try:
                taken = _take(self._cells.popleft())
            except IndexError:
                continue  # another thread was faster
            if taken is not None:
                return taken[0]

    def _use_wakeup(self) -> None:
        try:
            self._wakeups.get_nowait()
        except Empty:  # the put was interrupted before its wake-up, or is about to send it
            pass

    def shut(self) -> None:
        """Refuse every put and get from now on; remaining items wait for :meth:`close`."""
        self._closed = True
        self._wakeups.put(None)

    def close(self) -> list[T]:
        """Shut the queue and return the items not received; later calls return an empty list."""
        self.shut()
        left: list[T] = []
        while self._cells:
            try:
                taken = _take(self._cells.popleft())
            except IndexError:  # another thread was faster
                break
            if taken is not None:
                left.append(taken[0])
        return left

    def is_closed(self) -> bool:
        """Whether the queue was shut; with concurrent threads only "yes" is final."""
        return self._closed

    def depth(self) -> int:
        """The number of waiting items; with concurrent threads, a snapshot."""
        return len(self._cells)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<ClosableQueue {state}, about {len(self._cells)} waiting>"


def _take(cell: list[T]) -> tuple[T] | None:
    """Empty ``cell`` unless already empty; ``list.pop`` is atomic, so one caller gets the item."""
    try:
        return (cell.pop(),)
    except IndexError:
        return None
