"""Replaces tensors in the arguments of a call."""

from __future__ import annotations

import operator
from collections import UserDict, deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from pipert._torch import pytree
from pipert.batch.tensors import tensors_of
from pipert.batch.trees import ORDINARY, is_opaque

_WITHOUT_TENSORS = ORDINARY - {Tensor, nn.Parameter} | {slice, type(...)}


def map_each(values: Iterable[Any], bring: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return :func:`map_tensors` of each value. Runs for each call, so it does most by itself."""
    found = []
    for value in values:
        if type(value) is Tensor:
            value = bring(value)
        elif type(value) not in _WITHOUT_TENSORS:
            value = map_tensors(value, bring)
        found.append(value)
    return found


def map_tensors(value: Any, bring: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with each tensor replaced by ``bring(tensor)``, in containers as well.

    Lists and dicts, those derived from them, and registered dataclasses stay the same objects,
    since the called function may change them.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return bring(value)
    if kind in ORDINARY:
        return value
    if kind is tuple:
        return tuple(map_each(value, bring))
    if isinstance(value, list | deque | dict | UserDict):
        items = enumerate(value) if isinstance(value, list | deque) else value.items()
        for key, item in list(items):
            if (brought := map_tensors(item, bring)) is not item:
                value[key] = brought
    elif not is_opaque(value):
        return _map_tree(value, bring)
    return value


def in_same_object(value: Any, rebuilt: Any) -> Any:
    """Return ``value`` with the tensors of ``rebuilt``, which is a copy with other tensors.

    A list that a layer was given and returns stays the caller's.
    """
    if type(value) in ORDINARY or isinstance(value, Tensor):
        return rebuilt
    others = zip(tensors_of(value)[0], tensors_of(rebuilt)[0], strict=True)
    other_of = {id(tensor): other for tensor, other in others}
    return map_tensors(value, lambda tensor: other_of[id(tensor)])


def _map_tree(value: Any, bring: Callable[[Tensor], Tensor]) -> Any:
    """Do the same for a registered pytree, or a mapping other than a dict."""
    if type(value) in pytree.SUPPORTED_NODES and is_dataclass(value) and not _is_frozen(value):
        for name in [one.name for one in fields(value) if hasattr(value, one.name)]:
            if (brought := map_tensors(getattr(value, name), bring)) is not getattr(value, name):
                setattr(value, name, brought)
        return value
    tensors, rebuild = tensors_of(value)
    all_brought = tuple(map(bring, tensors))
    return value if all(map(operator.is_, tensors, all_brought)) else rebuild(all_brought)


def _is_frozen(value: Any) -> bool:
    return bool(type(value).__dataclass_params__.frozen)
