"""Accesses the tensors inside a value, which is any pytree.

A tensor that a value has twice is one: whatever is done to the tensors of a value, such as copying
them to another device, it comes out as one, so that a layer that changes it in place changes it in
both places, as in the plain module. Skips are values of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from pipert._typing import Tensors, Value
from pipert.batch.trees import flatten

__all__: list[str] = []


class Carried(NamedTuple):
    """A partition's input or output: a value, and the skips that arrive or leave with it."""

    value: Value
    skips: tuple[Value, ...]


def select(
    value: Value, wanted: Callable[[Tensor], bool]
) -> tuple[Tensors, Callable[[Tensors], Value]]:
    """Returns the ``wanted`` tensors of ``value``, and a function that substitutes others."""
    if isinstance(value, Tensor):
        return ((value,), _only) if wanted(value) else ((), lambda _: value)
    if isinstance(value, Carried):
        return _select_each(value, wanted)
    leaves, spec = flatten(value)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and wanted(leaf)]
    selected: dict[int, Tensor] = {}  # by id, in order
    for k in places:
        selected.setdefault(id(leaves[k]), leaves[k])
    numbers = {key: number for number, key in enumerate(selected)}
    filling = [(k, numbers[id(leaves[k])]) for k in places]
    for k in places:
        leaves[k] = None  # so that ``rebuild`` does not keep them alive

    def rebuild(tensors: Tensors) -> Value:
        filled = list(leaves)
        for k, number in filling:
            filled[k] = tensors[number]
        return pytree.tree_unflatten(filled, spec)

    return tuple(selected.values()), rebuild


def _select_each(
    carried: Carried, wanted: Callable[[Tensor], bool]
) -> tuple[Tensors, Callable[[Tensors], Value]]:
    parts = [select(part, wanted) for part in (carried.value, *carried.skips)]
    each = [(len(tensors), rebuild) for tensors, rebuild in parts]

    def rebuild(tensors: Tensors) -> Value:
        left = iter(tensors)
        value, *skips = [own(tuple(islice(left, count))) for count, own in each]
        return Carried(value, tuple(skips))

    return tuple([tensor for tensors, _ in parts for tensor in tensors]), rebuild


def differentiable(value: Value) -> tuple[Tensors, Callable[[Tensors], Value]]:
    """:func:`select` of the tensors that require grad."""
    if isinstance(value, Tensor):  # by far the most common, and in the way of every task
        return ((value,), _only) if value.requires_grad else ((), lambda _: value)
    return select(value, lambda tensor: tensor.requires_grad)


def tensors_of(value: Value) -> tuple[Tensors, Callable[[Tensors], Value]]:
    """:func:`select` of all tensors."""
    return ((value,), _only) if isinstance(value, Tensor) else select(value, lambda _: True)


def describe(value: Value) -> str:
    """Formats a value for errors: tensors by dtype and shape, the rest by structure and type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(describe, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    return type(value).__qualname__


def version(tensor: Tensor | None) -> int:
    """Returns how often a tensor was modified in place; -1 if it does not count that."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


_only: Callable[[Tensors], Any] = itemgetter(0)
