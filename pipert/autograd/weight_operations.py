"""The operations whose weight's gradient can be computed later, from ``x`` and ``dy`` alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

ToWeight = Callable[[Tensor, Tensor], Tensor]
"""Computes the gradient of a weight from the input and the gradient of one of its uses."""


class Rule(NamedTuple):
    """The rule for the nodes of one operation."""

    place: int
    """The place of the weight among the inputs of the node."""
    saved: str | None
    """The name of the input that the weight meets, among what the node saves; ``None`` if its
    gradient depends on ``dy`` alone."""
    make: Callable[[Any, bool, Tensor], ToWeight | None]
    """Takes the node, whether the weight is transposed on the way, and the weight."""


def _of_product(node: Any, is_transposed: bool, _: Tensor) -> ToWeight | None:
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    return _transposed_product if is_transposed else _product


def _product(x: Tensor, dy: Tensor) -> Tensor:
    return x.mH @ dy


def _transposed_product(x: Tensor, dy: Tensor) -> Tensor:
    """Compute the same, in the layout of the weight once it is transposed back."""
    return (dy.t() @ x.conj()).t()


def _of_convolution(node: Any, is_transposed: bool, weight: Tensor) -> ToWeight | None:
    if is_transposed:
        return None
    settings = [getattr(node, f"_saved_{name}", None) for name in _SETTINGS]
    return None if None in settings else partial(_convolved, weight.detach(), settings)


_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _convolved(weight: Tensor, settings: list[Any], x: Tensor, dy: Tensor) -> Tensor:
    w = weight if weight.dtype == x.dtype else torch.empty_like(weight, dtype=x.dtype)
    found: Tensor
    _, found, _ = torch.ops.aten.convolution_backward(
        dy, x, w, None, *settings, [False, True, False]
    )
    return found


def _of_bias(node: Any, is_transposed: bool, _: Tensor) -> ToWeight | None:
    return None if is_transposed else _summed


def _summed(_: Tensor, dy: Tensor) -> Tensor:
    return dy.sum((0, *range(2, dy.dim())))


RULES = {
    "AddmmBackward0": (Rule(2, "mat1", _of_product),),
    "MmBackward0": (Rule(1, "self", _of_product),),
    # On CPU the gradient of the bias alone takes as long as with that of the weight.
    "ConvolutionBackward0": (Rule(1, "input", _of_convolution), Rule(2, None, _of_bias)),
}
"""By the name of a node. A node of another name computes all its gradients in ``B``."""
