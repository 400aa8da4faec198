"""Tests that a custom autograd function finds in its backward the weight that it has saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert

Attributed = Any  # a parameter with an attribute


class Times(torch.autograd.Function):
    """A linear layer that adds its weight's gradient to an attribute of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Attributed) -> Tensor:
        ctx.save_for_backward(x, weight)
        y: Tensor = x @ weight.t()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad += dy.t() @ x
        return dy @ weight, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight: Attributed = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        weight.main_grad = torch.zeros(3, 3, dtype=torch.float64)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Times.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), nn.Tanh(), Layer())


@pytest.mark.parametrize("make", [pipert.Pipe, pipert.pipeline])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_saved_weight_has_its_attributes(
    make: Any, schedule: str | None, checkpoint: str
) -> None:
    module, plain, x = model(), model(), torch.ones(4, 3, dtype=torch.float64)
    plain(x).sum().backward()
    where: Any = [2, 1] if make is pipert.Pipe else ["2"]
    with make(module, where, devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        if schedule is None:
            pipe(x).sum().backward()
        else:
            pipe.forward_backward(
                x, loss_fn=lambda y, _: y.sum(), reduction="sum", schedule=schedule
            )
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        attributes: list[Attributed] = [found, expected]
        torch.testing.assert_close(*[each.main_grad for each in attributes])
