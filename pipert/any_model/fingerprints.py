"""Takes fingerprints of what modules hold, which can be compared later and keep little alive."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from numbers import Number
from typing import Any

import torch

from pipert.layers.buffers import original_of

__all__: list[str] = []

_PLAIN = {bool, int, str, bytes, type(None), slice, range, torch.device}
_MAPPINGS = {dict, OrderedDict, defaultdict}
_CONTAINERS = (list, tuple, set, frozenset, deque)  # named tuples, too
_MAX_DEPTH = 4  # of nested containers
_MAX_ITEMS = 1000  # of a container that is inspected: no vocabularies, no data sets


def items_of(mapping: Any) -> list[tuple[Any, Any]]:
    """Return the items of a mapping to which another micro-batch may be adding.

    They are copied in one go. ``dict.items`` also serves an ``OrderedDict``, whose own ``items()``
    would call methods of its keys.
    """
    return list(dict.items(mapping) if isinstance(mapping, dict) else mapping.items())


def fingerprint(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return what ``==`` compares of a value. Keeps the value alive only if it must."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Number):  # numpy's are, too
        return kind, repr(value)  # two NaN are the same
    if kind in _MAPPINGS or isinstance(value, _CONTAINERS):
        if not depth or len(value) > _MAX_ITEMS:
            return _SameObject(value), len(value)
        items = items_of(value) if kind in _MAPPINGS else list(value)
        return kind, [fingerprint(item, depth - 1) for item in items]
    return _SameObject(original_of(value))


class _SameObject:
    """Equal to others of the same object."""

    __slots__ = ("_found",)

    def __init__(self, value: Any) -> None:
        try:
            self._found = weakref.ref(value)  # always the same one
        except TypeError:
            self._found = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _SameObject and self._found is other._found
