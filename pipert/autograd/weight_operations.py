"""The operations whose weight's gradient can be computed later, from ``x`` and ``dy`` alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

ToWeight = Callable[[Tensor, Tensor, bool], tuple[Tensor, ...]]
"""Computes the gradient of a weight from the input and the gradient of one of its uses; if the
flag is set, that of the bias as well."""


class Rule(NamedTuple):
    """The rule for the nodes of one operation."""

    place: int
    """The place of the weight among the inputs of the node."""
    bias: int | None
    """The place of a bias that is put off together with the weight."""
    saved: str
    """The name of the input that the weight meets, among what the node saves."""
    make: Callable[[Any, bool, Tensor], ToWeight | None]
    """Takes the node, whether the weight is transposed on the way, and the weight."""


def _of_product(node: Any, is_transposed: bool, _: Tensor) -> ToWeight | None:
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    return _transposed_product if is_transposed else _product


def _product(x: Tensor, dy: Tensor, _: bool) -> tuple[Tensor, ...]:
    return (x.mH @ dy,)


def _transposed_product(x: Tensor, dy: Tensor, _: bool) -> tuple[Tensor, ...]:
    """Compute the same, in the layout of the weight once it is transposed back."""
    return ((dy.t() @ x.conj()).t(),)


def _of_convolution(node: Any, is_transposed: bool, weight: Tensor) -> ToWeight | None:
    if is_transposed:
        return None
    settings = [getattr(node, f"_saved_{name}", None) for name in _SETTINGS]
    return None if None in settings else partial(_convolved, weight.detach(), settings)


_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _convolved(
    weight: Tensor, settings: list[Any], x: Tensor, dy: Tensor, has_bias: bool
) -> tuple[Tensor, ...]:
    w = weight if weight.dtype == x.dtype else torch.empty_like(weight, dtype=x.dtype)
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        dy, x, w, [dy.shape[1]], *settings, [False, True, has_bias]
    )
    return (of_weight, of_bias) if has_bias else (of_weight,)


RULES = {
    "AddmmBackward0": Rule(2, None, "mat1", _of_product),
    "MmBackward0": Rule(1, None, "self", _of_product),
    # On CPU the gradient of the bias alone takes as long as with that of the weight.
    "ConvolutionBackward0": Rule(1, 2, "input", _of_convolution),
}
"""By the name of a node. A node of another name computes all its gradients in ``B``."""
