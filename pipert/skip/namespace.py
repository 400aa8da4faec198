"""Identifies skips by their name and a namespace, which distinguishes skips of the same name."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Namespace"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace for skips: use a new one for each pair, or group, of layers that share names.

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
