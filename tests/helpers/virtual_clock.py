"""Provides a clock that only an operation advances, in its forward and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CLOCK", "Clock", "spend"]


class Clock:
    """A clock that only :func:`spend` advances."""

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
    """Copies ``x``; its forward and its backward advance the clock by so many seconds."""
    y: Tensor = _Spend.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return y
