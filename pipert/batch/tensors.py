"""Accesses the tensors inside a value, which is any pytree.

A tensor that occurs twice in a value counts once. Whatever is done to the tensors of a value, such
as copying them to another device, the result again has one tensor in both places, so a layer that
changes it in place changes both, as in the plain module.

Arguments of a call may hold tensors in more than pytrees, see :func:`map_tensors`.
"""

from __future__ import annotations

import operator
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import pytree
from pipert._typing import Tensors, Value
from pipert.batch.trees import ORDINARY, take_apart, unflatten


def select(
    value: Value, wanted: Callable[[Tensor], object]
) -> tuple[Tensors, Callable[[Tensors], Value]]:
    """Return the ``wanted`` tensors of ``value``, and a function that rebuilds it with others."""
    if isinstance(value, Tensor):
        return ((value,), _only) if wanted(value) else ((), lambda _: value)
    leaves: list[Any] = []
    structure = take_apart(value, leaves)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and wanted(leaf)]
    selected = tuple([leaves[k] for k in places])
    numbers: Sequence[int] | None = None  # for each place, the index of its tensor in ``selected``
    if len(set(map(id, selected))) < len(selected):
        numbers, selected = _without_duplicates(selected)
    for k in places:
        leaves[k] = None  # so that ``rebuild`` does not keep the tensors alive

    def rebuild(tensors: Tensors) -> Value:
        each = tensors if numbers is None else [tensors[number] for number in numbers]
        filled = list(leaves)
        for k, tensor in zip(places, each, strict=True):
            filled[k] = tensor
        return unflatten(structure, iter(filled))

    return selected, rebuild


def _without_duplicates(tensors: Tensors) -> tuple[Sequence[int], Tensors]:
    distinct = {id(tensor): tensor for tensor in tensors}
    order = {key: number for number, key in enumerate(distinct)}
    return [order[id(tensor)] for tensor in tensors], tuple(distinct.values())


def differentiable(value: Value) -> tuple[Tensors, Callable[[Tensors], Value]]:
    """Select the tensors that require grad; see :func:`select`."""
    if isinstance(value, Tensor):  # by far the most common case, in every task
        return ((value,), _only) if value.requires_grad else ((), lambda _: value)
    return select(value, _requires_grad)


def tensors_of(value: Value) -> tuple[Tensors, Callable[[Tensors], Value]]:
    """Select all tensors; see :func:`select`."""
    return ((value,), _only) if isinstance(value, Tensor) else select(value, id)  # true of any


def describe(value: Value) -> str:
    """Format a value for errors: tensors by dtype and shape, the rest by structure and type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(describe, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    return type(value).__qualname__


def version(tensor: Tensor | None) -> int:
    """Return a tensor's version, which counts in-place changes; -1 if it has none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the :func:`version` of each tensor, if possible without running Python for each."""
    is_any = any(map(Tensor.is_inference, tensors))
    return list(map(version, tensors)) if is_any else list(map(_version, tensors))


_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_version: Callable[[Tensor], int] = attrgetter("_version")
_only: Callable[[Tensors], Any] = itemgetter(0)


def alone(gradient: Tensor) -> Tensor:
    """Return ``gradient`` in a storage of its own, so that it keeps no larger tensor alive.

    Where a skip is concatenated to something, its gradient is a part of a larger tensor, and waits
    until the stage that stashed it goes backward.
    """
    if gradient.layout != torch.strided or gradient.untyped_storage().nbytes() <= gradient.nbytes:
        return gradient
    return gradient.clone()


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
        return value
    return _map_tree(value, bring)


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
