"""Names skips, and stores stashed values until they are popped.

Inside a pipe each task has a store of its own. It starts with the skips that the partition pops and
that others have stashed; what is left at its end is for later partitions. Elsewhere, as in a plain
``nn.Sequential``, the store belongs to the thread. A value that a failed forward left in it is
replaced by the next stash of that name.

A popped value equals the stashed one. Across devices a later change could not be seen, so, to be
independent of the split, a tensor that was changed in place after it was stashed is refused
everywhere. Tensors of inference mode do not record changes; they are copied when stashed.
"""

from __future__ import annotations

import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pipert._typing import Value
from pipert.batch.tensors import tensors_of, versions

__all__ = ["Namespace"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace for skips: use a new one for each pair of layers that share names.

    >>> ns = Namespace()
    >>> unit = nn.Sequential(Stash().isolate(ns), body, PopAdd().isolate(ns))

    A copy, even through pickle, equals the original, so copied layers still belong together.
    """

    _id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"


Key: TypeAlias = tuple[Namespace | None, str]
"""Identifies a skip: its namespace, ``None`` for the default one, and its name."""


def show(key: Key) -> str:
    """Formats a skip's key for errors."""
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} in {namespace}"


Skips: TypeAlias = dict[Key, Value]
"""Stashed values between two tasks."""


class Carried(NamedTuple):
    """What layers of a partition with skips get, or return: a value, and the skips beside it."""

    value: Value
    skips: Skips


def parts_of(value: Value) -> list[Value]:
    """Return the skips beside a value, if there may be any, and the value itself."""
    return [*value.skips.values(), value.value] if isinstance(value, Carried) else [value]


class Stashed:
    """A stashed value; ``origin`` is the partition it comes from, on its way to another one."""

    __slots__ = ("_rebuild", "_tensors", "_versions", "origin")

    def __init__(self, value: Value, origin: int | None = None) -> None:
        self.origin = origin
        self._tensors, self._rebuild = tensors_of(value)
        self._versions = versions(self._tensors)

    def get(self, key: Key) -> Value:
        """Return the value in containers of its own, unless it has been modified in place."""
        if versions(self._tensors) != self._versions:
            raise RuntimeError(
                f"the skip {show(key)} was modified in place after it was stashed; stash a clone of"
                " it, or let the layer that modifies it work on a copy (inplace=False)"
            )
        return self._rebuild(self._tensors)


class Store:
    """The skips of one task, or of one thread outside pipes; it starts with ``skips``."""

    __slots__ = ("_values",)

    def __init__(self, skips: Skips | None = None) -> None:
        self._values = {key: Stashed(value) for key, value in (skips or {}).items()}

    def skips(self) -> Skips:
        """Return what is left for other layers."""
        return {key: stashed.get(key) for key, stashed in self._values.items()}

    def put(self, key: Key, value: Value) -> None:
        """Stash a value."""
        tensors, rebuild = tensors_of(value)
        if any([tensor.is_inference() for tensor in tensors]):
            value = rebuild(tuple([t.clone() if t.is_inference() else t for t in tensors]))
        self._values[key] = Stashed(value)

    def take(self, key: Key) -> Value:
        """Pop a value."""
        if key not in self._values:
            raise RuntimeError(
                f"there is no skip {show(key)} to pop: no layer has stashed it before, by yield "
                "stash(...), or its layers were put into a namespace after the Pipe was made"
            )
        return self._values.pop(key).get(key)


of_task: ContextVar[Store | None] = ContextVar("pipert_skips", default=None)
"""The store of the current task, in the task's own context, or of the current thread."""


def current_store() -> Store:
    """Returns the store that layers stash to and pop from in this context."""
    if (store := of_task.get()) is None:
        of_task.set(store := Store())
    return store
