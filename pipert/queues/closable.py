"""Queues items first in, first out. Any thread can close a queue, even from a finalizer.

Guarantees:

* **Q1** each item put is either received once, or returned once by ``drain`` or a ``put``.
* **Q2** ``close`` and ``drain`` wake whoever waits, now and later.
* **Q3** both may be called from a finalizer, on any thread, even on a thread that is inside
  ``put`` or ``get`` of the same queue at that moment.

Q3 rules out a lock: a finalizer that runs on the thread that holds it would wait for itself.
``SimpleQueue.put`` is atomic and reentrant. Who closes a queue sets the flag before it takes what
is left, and who puts looks at the flag afterwards, so one of the two takes an item that came late.

One thread receives. An exception thrown into it from outside is raised as soon as it wakes, after a
call, and would lose what the call returns. A ``for`` statement has no such place between the
queue and its variable, so that ``for item in queue`` loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class ClosableQueue(Generic[T]):
    """An unbounded FIFO of items of type ``T``, not ``None``, which ends it."""

    __slots__ = ("__weakref__", "_items", "closed")

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()
        self.closed = False
        """Whether it is closed: only ``True`` is sure to last."""

    def put(self, item: T) -> list[T]:
        """Append ``item``. Return the items that nobody will receive, if the queue is closed."""
        self._items.put(item)
        return self.drain() if self.closed else []

    def __iter__(self) -> Iterator[T]:
        """Receive the items one by one, once, waiting for each, until the queue is closed.

        An item may be received after that, too.
        """
        return iter(self._items.get, None)

    def get(self) -> T | None:
        """Receive the oldest item, waiting for one; ``None`` if the queue is closed."""
        return None if self.closed else self._items.get()

    def close(self) -> None:
        """Wake the receiver, now and later; the items stay until :meth:`drain`."""
        self.closed = True
        self._items.put(None)

    def drain(self) -> list[T]:
        """Close the queue and return the items not received."""
        self.closed = True
        left: list[T | None] = []
        try:
            while True:
                left.append(self._items.get_nowait())
        except Empty:
            self._items.put(None)  # for the receiver
        return [item for item in left if item is not None]

    def depth(self) -> int:
        """Return the number of waiting items; with concurrent threads, a snapshot."""
        return 0 if self.closed else self._items.qsize()
