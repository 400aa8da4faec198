"""Holds an item that only one taker gets, however many try."""

from __future__ import annotations

from typing import TypeVar

__all__: list[str] = []

T = TypeVar("T")


class Once(list[T]):
    """A list of one item. Whoever empties it owns the item: ``list.pop`` is atomic.

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
