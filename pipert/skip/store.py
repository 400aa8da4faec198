"""Stores stashed values until they are popped.

Inside a pipe each task has a store of its own. It starts with the skips that the partition pops and
that others have stashed; what is left at its end is for later partitions. Elsewhere, as in a plain
``nn.Sequential``, the store belongs to the thread. A value that a failed forward left in it is
replaced by the next stash of that name.

A popped value equals the stashed one. Across devices a later change could not be seen, so, to be
independent of the split, a tensor that was changed in place after it was stashed is refused
everywhere. Tensors of inference mode do not record changes; they are copied when stashed, and again
for each pop except the last.
"""

from __future__ import annotations

import enum
import threading
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

from pipert._typing import Tensors, Value
from pipert.batch.tensors import tensors_of, versions
from pipert.skip.namespace import Key, show


class _Sentinel(enum.Enum):
    NEW = "new"


NEW = _Sentinel.NEW
"""Stands for the store of a task whose partition declares no skips: it is made on demand."""


Skips: TypeAlias = dict[Key, tuple[int, Value]]
"""Skips between two tasks: how many pops are still to come, and the value."""


class Carried(NamedTuple):
    """What layers of a partition with skips get, or return: a value, and the skips beside it."""

    value: Value
    skips: Skips


def parts_of(value: Value) -> list[Value]:
    """Return the skips beside a value, if there may be any, and the value itself."""
    if isinstance(value, Carried):
        return [*[skip for _, skip in value.skips.values()], value.value]
    return [value]


class Stashed:
    """A snapshot of a value: each ``get`` rebuilds the containers.

    Args:
        value: any pytree.
        left: the number of pops still to come.
        origin: the partition that it comes from, on its way to another one.
        copy_inference: whether to copy the tensors of inference mode.
    """

    __slots__ = ("_rebuild", "_tensors", "_versions", "left", "origin")

    def __init__(
        self, value: Value, left: int, origin: int | None = None, copy_inference: bool = False
    ) -> None:
        self.left = left
        self.origin = origin
        self._tensors, self._rebuild = tensors_of(value)
        if copy_inference:
            self._tensors = _inference_copied(self._tensors)
        self._versions = versions(self._tensors)

    def get(self, key: Key, copy_inference: bool = False) -> Value:
        """Return the value, unless it has been modified in place."""
        if versions(self._tensors) != self._versions:
            raise RuntimeError(
                f"the skip {show(key)} was modified in place after it was stashed; stash a clone of"
                " it, or let the layer that modifies it work on a copy (inplace=False)"
            )
        return self._rebuild(_inference_copied(self._tensors) if copy_inference else self._tensors)


def _inference_copied(tensors: Tensors) -> Tensors:
    return tuple([tensor.clone() if tensor.is_inference() else tensor for tensor in tensors])


class Store:
    """The skips of one task, or of one thread outside pipes; it starts with ``skips``."""

    __slots__ = ("_values",)

    def __init__(self, skips: Skips | None = None) -> None:
        found = (skips or {}).items()
        self._values = {key: Stashed(value, left) for key, (left, value) in found}

    def skips(self) -> Skips:
        """Return what is left for other layers."""
        return {key: (stashed.left, stashed.get(key)) for key, stashed in self._values.items()}

    def put(self, key: Key, value: Value, pops: int) -> None:
        """Stash ``value`` for ``pops`` layers."""
        self._values[key] = Stashed(value, pops, copy_inference=True)

    def take(self, key: Key) -> Value:
        """Pop a value; the last pop removes it."""
        if key not in self._values:
            raise RuntimeError(
                f"there is no skip {show(key)} to pop: no layer has stashed it before, all layers "
                "that it was for have popped it, or its layers were put into a namespace after the "
                "Pipe was made"
            )
        stashed = self._values[key]
        value = stashed.get(key, copy_inference=stashed.left > 1)
        stashed.left -= 1
        if not stashed.left:
            del self._values[key]
        return value

    def clear(self) -> None:
        """Drop all values, since a nested run may keep the context that holds this store."""
        self._values.clear()

    def __repr__(self) -> str:
        return f"<Store of {', '.join(map(show, self._values)) or 'nothing'}>"


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.store = Store()


of_task: ContextVar[Store | _Sentinel | None] = ContextVar("pipert_skips", default=None)
"""The store of the current task, set in the task's own context; ``None`` outside tasks."""

_of_thread = _PerThread()


def current_store() -> Store:
    """Returns the store that layers stash to and pop from in this context."""
    store = of_task.get()
    if isinstance(store, Store):
        return store
    if store is None:
        return _of_thread.store
    new = Store()
    of_task.set(new)
    return new
