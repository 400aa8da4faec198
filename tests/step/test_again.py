"""Tests what ``R[i,j]`` of a step recomputes, and which leaves ``B[i,j]`` finds in its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe

M = 4
modes = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])


def rows(m: int = M) -> Tensor:
    """Makes ``m`` micro-batches of one row, whose first column is its number."""
    return torch.cat([torch.arange(float(m)).unsqueeze(1), torch.rand(m, 2)], 1)


def total(y: Tensor, _: Any) -> Tensor:
    return y.square().sum()


def step(model: nn.Module, checkpoint: str, loss_fn: Callable[..., Tensor] = total) -> Tensor:
    layers = nn.Sequential(model, nn.Linear(3, 3))  # drawn before the rows
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=M, checkpoint=checkpoint) as pipe:
        loss: Tensor = pipe.forward_backward(
            rows(), loss_fn=loss_fn, reduction="sum", schedule="1f1b"
        )
    return loss


class Experts(nn.Module):
    """A layer with a weight for each micro-batch, used by equally many operations."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        for k, weight in enumerate(weights):
            if isinstance(weight, nn.Parameter):
                self.register_parameter(f"expert{k}", weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[int(x[0, 0].item())]


@modes
@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_])
def test_each_micro_batch_may_use_other_weights(
    checkpoint: str, make: Callable[[Tensor], Tensor]
) -> None:
    """The weights are parameters, or tensors that a layer keeps for itself."""
    weights = [make(torch.full((3,), float(k))) for k in range(M)]
    step(Experts(weights), checkpoint)
    grads = [weight.grad for weight in weights]
    assert all(grad is not None and grad.any() for grad in grads)
