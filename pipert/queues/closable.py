"""Queues items first in, first out. Any thread can close a queue, even from a finalizer.

Guarantees:

* **Q1** each item put is either received once, or returned by :meth:`ClosableQueue.close`, or
  refused by its ``put``: exactly one of these.
* **Q2** ``close`` and ``shut`` wake every waiter, now and later.
* **Q3** both may be called from a finalizer, on any thread, even on a thread that is inside
  ``put`` or ``get`` of the same queue at that moment.

Q3 rules out a lock: a finalizer that runs on the thread that holds it would wait for itself.
``deque`` and ``SimpleQueue.put`` are atomic and reentrant; the former holds the items, the latter
wakes waiters. Each item is in a :class:`Once`, and whoever takes it from there owns it. This
settles the race of ``put`` with ``close``: a put that finds the queue closed afterwards tries to
take its item back. If it can, the item is refused; if it cannot, the item was received, or returned
by ``close``.

The wake-ups that a waiter blocks on carry no item. An exception thrown into a waiting thread from
outside is raised the moment the thread wakes, and would lose whatever the blocking call returns;
this way the item stays in the queue, where ``close`` finds it.
"""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(list[T]):
    """A list of one item. Whoever empties it owns the item, and ``list.pop`` is atomic.

    >>> once = Once(["item"])
    >>> once.take(), once.take()
    (('item',), None)
    """

    __slots__ = ()

    def take(self) -> tuple[T] | None:
        """Take the item, in a tuple; ``None`` if it was taken already."""
        try:
            return (self.pop(),)
        except IndexError:
            return None


class QueueClosed(Exception):
    """Raised on use of a closed queue. Never leaves pipert: whoever catches it settles the task."""


class ClosableQueue(Generic[T]):
    """An unbounded FIFO of items of type ``T``. Any number of threads may put, get and close."""

    __slots__ = ("__weakref__", "_cells", "_closed", "_wakeups")

    def __init__(self) -> None:
        self._cells: deque[Once[T]] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # one for each put, one for close
        self._closed: list[bool] = []  # not empty once the queue is closed

    def put(self, item: T) -> None:
        """Append ``item``, or raise :class:`QueueClosed`."""
        if self._closed:
            raise QueueClosed
        cell = Once((item,))
        self._cells.append(cell)
        self._wakeups.put(None)
        if self._closed and cell.take() is not None:
            raise QueueClosed

    def get(self) -> T:
        """Remove and return the oldest item, waiting for one; or raise :class:`QueueClosed`."""
        while True:
            if self._closed:
                raise QueueClosed
            if self._cells:
                try:
                    self._wakeups.get_nowait()
                except Empty:  # the put was interrupted before it woke anybody, or is about to
                    pass
            else:
                self._wakeups.get()
            if self._closed:
                self._wakeups.put(None)  # for the next waiter
                raise QueueClosed
            try:
                return self._cells.popleft().pop()
            except IndexError:
                continue  # it was taken meanwhile

    def shut(self) -> None:
        """Refuse every put and get from now on; the items stay until :meth:`close`."""
        self._closed.append(True)
        self._wakeups.put(None)

    def close(self) -> list[T]:
        """Shut the queue and return the items not received; later calls return an empty list."""
        self.shut()
        left: list[T] = []
        while self._cells:
            try:
                left += self._cells.popleft().take() or ()
            except IndexError:  # it was taken meanwhile
                break
        return left

    def is_closed(self) -> bool:
        """Return whether the queue was closed or shut: only ``True`` is sure to last."""
        return bool(self._closed)

    def depth(self) -> int:
        """Return the number of waiting items; with concurrent threads, a snapshot."""
        return len(self._cells)
