"""Finds tensors and arrays hidden in objects that torch cannot flatten.

Hidden tensors cannot be split, joined, moved to another device or cut out of their graph. The
search follows the references that the garbage collector knows, up to a limit: it calls nothing, and
sees attributes, slots and containers alike. It does not enter modules and types, and enters
functions only on request.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from pipert.batch.tensors import version
from pipert.batch.trees import ORDINARY

__all__: list[str] = []

_LIMIT = 10_000  # references followed in one search

CLOSED_TO_GRAPHS = (type, nn.Module, ModuleType, Tensor)
"""Types that hide no tensor of a graph. Functions may hide one in a closure or a bound object."""

CLOSED = (*CLOSED_TO_GRAPHS, FunctionType, BuiltinFunctionType, MethodType)
"""Types that are not searched by default: tensors that a function holds need not be rows."""

REMEDY = (
    "put its tensors into a tuple, list or dict, or register its class as a pytree with "
    "torch.utils._pytree.register_pytree_node"
)
"""Advice on how to make the tensors in an object visible, for error messages."""


def has_rows(value: Any) -> bool:
    """Return whether ``value`` is a tensor or an array with at least one dimension."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if type(value) in ORDINARY or isinstance(value, CLOSED):
        return False
    attributes = getattr(value, "__dict__", ())
    is_array = all(name in attributes or hasattr(type(value), name) for name in ("ndim", "shape"))
    return is_array and bool(value.ndim)


def hides(
    value: Any, wanted: Callable[[Any], bool], closed: tuple[type, ...] = CLOSED
) -> bool:
    """Return whether an object refers to a ``wanted`` one, directly or through others.

    Instances of the ``closed`` types are not searched.
    """
    if type(value) in ORDINARY or isinstance(value, closed):
        return False
    seen = {id(value): value}
    left, visited = deque([value]), 0
    while left and visited < _LIMIT:
        for part in _references(left.popleft()):
            visited += 1
            if wanted(part):
                return True
            if not (type(part) in ORDINARY or isinstance(part, closed) or id(part) in seen):
                seen[id(part)] = part
                left.append(part)
    return False


def _references(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):  # all but the globals of its module
        return [item.__closure__, item.__defaults__, item.__kwdefaults__]
    return gc.get_referents(item)


def versions(value: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors hidden in an object, each with its version, in the order of their ids."""
    found: list[tuple[Tensor, int]] = []

    def note(part: Any) -> bool:
        if isinstance(part, Tensor):
            found.append((part, version(part)))
        return False

    hides(value, note)
    return sorted(found, key=lambda pair: id(pair[0]))
