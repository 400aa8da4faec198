"""Stores stashed values until they are popped.

Inside a pipe each task has a store of its own, which starts with the values from other partitions
and is emptied at the end: only values that are sent on outlive the task. Elsewhere, as in a plain
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
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from pipert._typing import Tensors, Value
from pipert.batch.tensors import tensors_of, versions
from pipert.skip.namespace import Key, show


class _Sentinel(enum.Enum):
    ABSENT = "absent"
    NEW = "new"


ABSENT = _Sentinel.ABSENT
"""Stands for a skip whose stashing layer did not run, as a nested layer may not."""

NEW = _Sentinel.NEW
"""Stands for the store of a task whose partition declares no skips: it is made on demand."""


Entry = tuple[Key, int, Value]
"""A skip, the number of pops still to come, and the value."""


class Stashed:
    """A snapshot of a value: each ``get`` rebuilds the containers.

    Args:
        value: any pytree.
        left: the number of pops still to come.
        copy_inference: whether to copy the tensors of inference mode.
    """

    __slots__ = ("_rebuild", "_tensors", "_versions", "left")

    def __init__(self, value: Value, left: int = 1, copy_inference: bool = False) -> None:
        self.left = left
        self._tensors, self._rebuild = tensors_of(value)
        if copy_inference:
            self._tensors = _inference_copied(self._tensors)
        self._versions = versions(self._tensors)

    def get(self, key: Key) -> Value:
        """Pops the value, unless it has been modified in place."""
        self.refuse_changes(key)
        self.left -= 1
        return self._rebuild(_inference_copied(self._tensors) if self.left else self._tensors)

    def entry(self, key: Key) -> Entry:
        """Return the value, unless it has been modified in place, for another store."""
        self.refuse_changes(key)
        return key, self.left, self._rebuild(self._tensors)

    def refuse_changes(self, key: Key) -> None:
        if versions(self._tensors) != self._versions:
            raise RuntimeError(
                f"the skip {show(key)} was modified in place after it was stashed; stash a clone of"
                " it, or let the layer that modifies it work on a copy (inplace=False)"
            )


def _inference_copied(tensors: Tensors) -> Tensors:
    return tuple([tensor.clone() if tensor.is_inference() else tensor for tensor in tensors])


class Store:
    """The skips of one task, or of one thread outside pipes.

    Args:
        pops: how many layers of the task's partition pop each declared skip; ``None`` outside
            pipes.
        sent: the skips sent to other partitions, once per destination.
        entries: what it starts with.
    """

    __slots__ = ("_pops", "_sent", "_values")

    def __init__(
        self,
        pops: Mapping[Key, int] | None = None,
        sent: Sequence[Key] = (),
        entries: Sequence[Entry] = (),
    ) -> None:
        self._pops = pops
        self._sent = sent
        self._values = {key: Stashed(value, left) for key, left, value in entries}

    def entries(self) -> tuple[Entry, ...]:
        """Return what is left for other layers."""
        return tuple([stashed.entry(key) for key, stashed in self._values.items()])

    def put(self, key: Key, value: Value, pops: int) -> None:
        """Stash ``value`` for ``pops`` layers, as the stashing layer declares."""
        if self._pops is not None and key in self._pops:
            pops = self._pops[key] + self._sent.count(key)
        if pops:
            self._values[key] = Stashed(value, pops, copy_inference=True)

    def take(self, key: Key) -> Value:
        """Pop a value; the last pop removes it."""
        if key not in self._values:
            message = (
                f"there is no skip {show(key)} to pop: no layer has stashed it before, or all "
                "layers that it was for have popped it"
            )
            if self._pops is not None and key not in self._pops:
                message = (
                    f"there is no skip {show(key)} to pop: no layer of this partition declared it "
                    "when the Pipe was made; make the Pipe when its layers are complete and in "
                    "their namespaces"
                )
            raise RuntimeError(message)
        return self._hand_out(key)

    def send(self, key: Key) -> Value:
        """Return a skip for another partition; ``ABSENT`` if the stashing layer did not run."""
        return self._hand_out(key) if key in self._values else ABSENT

    def _hand_out(self, key: Key) -> Value:
        stashed = self._values[key]
        value = stashed.get(key)
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
    new = Store({})
    of_task.set(new)
    return new
