"""Provides layers that many tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Apply", "product"]


class Apply(nn.Module):
    """A layer that calls a function, about which pipert knows nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Labelled(Tensor):
    """A tensor of another class, which operations keep."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0).view_as(w)


def product(x: Tensor, w: Tensor) -> Any:
    """Multiplies rows by a weight in a custom autograd function, which no function mode sees."""
    return _Product.apply(x, w)  # type: ignore[no-untyped-call]
