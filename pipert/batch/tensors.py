"""Accesses the tensors inside a value, which is any pytree.

A tensor that occurs twice in a value counts once. Whatever is done to the tensors of a value, such
as copying them to another device, the result again has one tensor in both places, so a layer that
changes it in place changes both, as in the plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.batch.trees import take_apart, unflatten


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
