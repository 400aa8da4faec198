"""A clock that stands still unless an operation moves it, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CLOCK", "Clock", "spend"]


class Clock:
    """Stands still unless :func:`spend` moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_takes = backward
        CLOCK.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        CLOCK.now += ctx.backward_takes
        return grads[0], None, None


def spend(x: Tensor, forward: float, backward: float) -> Tensor:
    """Return a copy of ``x`` after so many seconds, and its gradient after so many."""
    y: Tensor = _Spend.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return y
