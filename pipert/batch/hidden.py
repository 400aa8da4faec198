"""Finds tensors and arrays inside of objects that torch cannot flatten.

What it finds there cannot be split, joined, brought to another device or cut out of its graph. It
looks through attributes, slots, and the built-in containers in them, their views and iterators,
nearest first, in so many places at most. It does not look into modules and types, nor behind what
an object computes when it is asked; into functions only where that is asked for.
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

_MOST = 10_000  # places

CLOSED_TO_GRAPHS = (type, nn.Module, ModuleType, Tensor)
"""What hides no tensor of a graph: what a function has bound, it takes along."""

CLOSED = (*CLOSED_TO_GRAPHS, FunctionType, BuiltinFunctionType, MethodType)
"""What it does not look into. The tensors of a function need not be rows."""


def has_rows(value: Any) -> bool:
    """Whether it is a tensor or an array with a dimension."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if type(value) in ORDINARY or isinstance(value, CLOSED):
        return False
    own = getattr(value, "__dict__", ())
    is_array = all(name in own or hasattr(type(value), name) for name in ("ndim", "shape"))
    return is_array and bool(value.ndim)


def registered(leaf: Any) -> str:
    """What to do with an object, so that its tensors are found."""
    if type(leaf).__module__.startswith("transformers.cache"):
        return "leave it out, by use_cache=False"
    if isinstance(leaf, (*CLOSED, Iterator, MappingView)):  # classes of Python's, not the user's
        return "put its tensors into a tuple, list or dict"
    if dataclasses.is_dataclass(leaf):
        return "register its class with torch.export.register_dataclass"
    return "register its class as a pytree with torch.utils._pytree.register_pytree_node"


def find(
    value: Any, wanted: Callable[[Any], bool], closed: tuple[type, ...] = CLOSED
) -> str | None:
    """Returns where in an object something ``wanted`` is, such as ``.pair[0]``; else ``None``.

    It does not look into what is ``closed``.
    """
    if type(value) in ORDINARY or isinstance(value, closed):
        return None
    met = {id(value): value}
    left, looked = deque([("", value)]), 0
    while left and looked < _MOST:
        path, item = left.popleft()
        for name, part in islice(_parts(item), _MOST - looked):
            looked += 1
            if wanted(part):
                return path + name
            ordinary = type(part) in ORDINARY or isinstance(part, closed)
            if not ordinary and id(part) not in met:
                met[id(part)] = part
                left.append((path + name, part))
    return None


def versions(value: Any) -> list[tuple[Tensor, int]]:
    """The tensors inside of an object, each with how often it was modified in place."""
    found: list[tuple[Tensor, int]] = []

    def note(part: Any) -> bool:
        if isinstance(part, Tensor):
            found.append((part, version(part)))
        return False

    find(value, note)
    return found


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    # Copies of containers: others may be changing them.
    if isinstance(item, dict | MappingProxyType):
        yield from ((f"[{key!r}]", part) for key, part in list(item.items()))
    elif isinstance(item, list | tuple | deque):
        yield from ((f"[{k}]", part) for k, part in enumerate(list(item)))
    elif isinstance(item, set | frozenset):
        yield from (("{...}", part) for part in list(item))
    elif isinstance(item, Iterator | MappingView):  # looked at from outside: not to be used up
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
        for part in gc.get_referents(cell):  # an empty one has none
            yield f".__closure__[{name!r}]", part
