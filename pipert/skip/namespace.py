"""Names of skips, and what tells two pairs of the same name apart."""

from __future__ import annotations

import uuid
from typing import TypeAlias

__all__ = ["Namespace"]


class Namespace:
    """Tells skips of the same name apart: a fresh one for each pair, or group, of layers.

    >>> ns = Namespace()
    >>> unit = nn.Sequential(Stash().isolate(ns), body, PopAdd().isolate(ns))

    A copy, also one that was pickled, is equal to the original: what belonged together still does.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"


Key: TypeAlias = tuple[Namespace | None, str]
"""What a skip is known by: its namespace, ``None`` for the default one, and its name."""


def show(key: Key) -> str:
    """How an error calls a skip."""
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} in {namespace}"
