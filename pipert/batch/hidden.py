"""Finds tensors and arrays hidden in objects that torch cannot flatten.

Hidden tensors cannot be split, joined, moved to another device or cut out of their graph. The
search goes breadth-first through attributes, slots, and the built-in containers in them, with their
views and iterators, up to a limit. It does not enter modules and types, and enters functions only
on request. It calls nothing, so it does not see properties.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import deque
from collections.abc import Callable, Iterator, MappingView
from itertools import islice
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from pipert.batch.tensors import version
from pipert.batch.trees import ORDINARY

__all__: list[str] = []

_LIMIT = 10_000  # parts visited in one search

CLOSED_TO_GRAPHS = (type, nn.Module, ModuleType, Tensor)
"""Types that hide no tensor of a graph. Functions may hide one in a closure or a bound object."""

CLOSED = (*CLOSED_TO_GRAPHS, FunctionType, BuiltinFunctionType, MethodType)
"""Types that are not searched by default: tensors that a function holds need not be rows."""


def has_rows(value: Any) -> bool:
    """Return whether ``value`` is a tensor or an array with at least one dimension."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if type(value) in ORDINARY or isinstance(value, CLOSED):
        return False
    attributes = getattr(value, "__dict__", ())
    is_array = all(name in attributes or hasattr(type(value), name) for name in ("ndim", "shape"))
    return is_array and bool(value.ndim)


def registered(leaf: Any) -> str:
    """Return advice on how to make the tensors in an object visible, for an error message."""
    if type(leaf).__module__.startswith("transformers.cache"):
        return "leave it out, by use_cache=False"
    if isinstance(leaf, (*CLOSED, Iterator, MappingView)):  # Python's own classes
        return "put its tensors into a tuple, list or dict"
    if dataclasses.is_dataclass(leaf):
        return "register its class with torch.export.register_dataclass"
    return "register its class as a pytree with torch.utils._pytree.register_pytree_node"


def find(
    value: Any, wanted: Callable[[Any], bool], closed: tuple[type, ...] = CLOSED
) -> str | None:
    """Return the path to a ``wanted`` part of an object, such as ``.pair[0]``, or ``None``.

    Instances of the ``closed`` types are not searched.
    """
    if type(value) in ORDINARY or isinstance(value, closed):
        return None
    seen = {id(value): value}
    left, visited = deque([("", value)]), 0
    while left and visited < _LIMIT:
        path, item = left.popleft()
        for name, part in islice(_parts(item), _LIMIT - visited):
            visited += 1
            if wanted(part):
                return path + name
            ordinary = type(part) in ORDINARY or isinstance(part, closed)
            if not ordinary and id(part) not in seen:
                seen[id(part)] = part
                left.append((path + name, part))
    return None


def versions(value: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors hidden in an object, each with its version."""
    found: list[tuple[Tensor, int]] = []

    def note(part: Any) -> bool:
        if isinstance(part, Tensor):
            found.append((part, version(part)))
        return False

    find(value, note)
    return found


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    # Containers are copied, since other threads may be changing them.
    if isinstance(item, dict | MappingProxyType):
        yield from ((f"[{key!r}]", part) for key, part in list(item.items()))
    elif isinstance(item, list | tuple | deque):
        yield from ((f"[{k}]", part) for k, part in enumerate(list(item)))
    elif isinstance(item, set | frozenset):
        yield from (("{...}", part) for part in list(item))
    elif isinstance(item, Iterator | MappingView):  # iterating would use it up
        yield from (("{...}", part) for part in gc.get_referents(item))
    elif isinstance(item, FunctionType | MethodType | BuiltinFunctionType):
        yield from _bound(item)
    for name, part in list(getattr(item, "__dict__", {}).items()):
        yield f".{name}", part
    for kind in type(item).__mro__:
        for name, slot in vars(kind).items():
            if type(slot) is MemberDescriptorType:
                try:
                    part = slot.__get__(item)
                except AttributeError:  # not set
                    continue
                yield f".{name}", part


def _bound(function: FunctionType | MethodType | BuiltinFunctionType) -> Iterator[tuple[str, Any]]:
    if not isinstance(function, FunctionType):
        yield ".__self__", function.__self__
        return
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        for part in gc.get_referents(cell):  # an empty cell has none
            yield f".__closure__[{name!r}]", part
