"""Replaces tensors in the arguments of a call."""

from __future__ import annotations

import operator
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

from pipert.batch.tensors import tensors_of

__all__: list[str] = []


def swapped(value: Any, bring: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with each tensor replaced by ``bring(tensor)``, in containers as well.

    Lists and dicts, and those derived from them, stay the same objects, since the called function
    may add to them.
    """
    if isinstance(value, Tensor):
        return bring(value)
    kind = type(value)
    if kind is tuple:
        return tuple([swapped(item, bring) for item in value])
    if kind is list:
        value[:] = [swapped(item, bring) for item in value]
    elif kind is dict:
        value.update({key: swapped(item, bring) for key, item in value.items()})
    elif isinstance(value, list | deque):
        _swap_in(value, enumerate(value), bring)
    elif isinstance(value, dict | UserDict):
        _swap_in(value, value.items(), bring)
    elif kind not in _without_tensors:
        return _swapped_tree(value, bring)
    return value


def _swap_in(
    value: Any, items: Iterable[tuple[Any, Any]], bring: Callable[[Tensor], Tensor]
) -> None:
    for key, item in list(items):
        if (brought := swapped(item, bring)) is not item:
            value[key] = brought


def _swapped_tree(value: Any, bring: Callable[[Tensor], Tensor]) -> Any:
    """Do the same for a registered pytree, or a mapping other than a dict."""
    tensors, rebuild = tensors_of(value)
    if not tensors:
        if type(value) not in SUPPORTED_NODES and not isinstance(value, Mapping):
            _without_tensors.add(type(value))
        return value
    brought = tuple(map(bring, tensors))
    return value if all(map(operator.is_, tensors, brought)) else rebuild(brought)


_without_tensors: set[type] = set()
"""Types that torch cannot flatten, so their tensors are not found."""
