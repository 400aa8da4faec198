"""Accesses the tensors inside a value, which is any pytree."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipert._typing import Tensors, Value
from pipert.batch.trees import flatten

__all__: list[str] = []


def select(
    value: Value, wanted: Callable[[Tensor], bool]
) -> tuple[Tensors, Callable[[Tensors], Value]]:
    """Returns the ``wanted`` tensors of ``value``, and a function that substitutes others."""
    if isinstance(value, Tensor):
        return ((value,), _only) if wanted(value) else ((), lambda _: value)
    leaves, spec = flatten(value)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and wanted(leaf)]
    selected = tuple([leaves[k] for k in places])
    for k in places:
        leaves[k] = None  # so that ``rebuild`` does not keep them alive

    def rebuild(tensors: Tensors) -> Value:
        filled = list(leaves)
        for k, tensor in zip(places, tensors, strict=True):
            filled[k] = tensor
        return pytree.tree_unflatten(filled, spec)

    return selected, rebuild


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
