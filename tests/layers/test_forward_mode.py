"""Forward-mode differentiation works in one task at a time, and is refused in several."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, TransformError
from tests.torchscript import uses_torchscript

# torch scripts its own formulas when forward-mode differentiation first needs them.
pytestmark = uses_torchscript


class Directional(nn.Module):
    """Returns the derivative of the square in direction 1, under ``block``."""

    def __init__(self, block: AbstractContextManager[object]) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        with self.block:
            tangent: Tensor = torch.func.jvp(self.square, (x,), (torch.ones_like(x),))[1]
        return tangent

    def square(self, x: Tensor) -> Tensor:
        return x * x


class Inside(Directional):
    """Stays inside of its second ``jvp`` until another layer has tried one."""

    def __init__(self) -> None:
        super().__init__(nullcontext())
        self.entered, self.tried, self.calls = threading.Event(), threading.Event(), 0

    def square(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.entered.set()
            assert self.tried.wait(30)
        return x * x


class Second(Directional):
    def __init__(self, first: Inside) -> None:
        super().__init__(nullcontext())
        self.first = (first,)

    def forward(self, x: Tensor) -> Tensor:
        (first,) = self.first
        try:
            assert first.entered.wait(30)
            return super().forward(x)
        finally:
            first.tried.set()


def test_layers_that_differentiate_in_forward_mode_at_the_same_time_are_refused() -> None:
    first = Inside()
    with Pipe(nn.Sequential(first, Second(first)), [1, 1], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(TransformError, match=r"threading.Lock(.|\n)*F\[0,1\]"):
            pipe(torch.ones(4, 1))


def test_a_lock_around_forward_mode_makes_it_right() -> None:
    lock = threading.Lock()
    layers = nn.Sequential(*[Directional(lock) for _ in range(3)])
    x = torch.arange(8.0)[:, None].requires_grad_()
    with Pipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=8, checkpoint="never") as pipe:
        y = pipe(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, 8 * x) and gradient.eq(8).all()
