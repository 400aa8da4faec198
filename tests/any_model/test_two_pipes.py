"""Tests a step whose function calls a model that is in a pipe of its own, such as a teacher."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.helpers.ways import grads_of


class Net(nn.Module):
    """Its own code uses tensors of the first partition in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() * 2
        y: Tensor = self.third(self.second(h) + h)
        return y


@pytest.mark.parametrize(
    "devices", [["cpu", "cpu"], pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.multi_gpu)]
)
@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("1f1b", "never"), ("gpipe", "always")]
)
def test_gradients_are_those_of_the_plain_models(
    schedule: str, checkpoint: str, devices: list[str]
) -> None:
    """On GPUs the step's own copies between devices are not for tensors of the inner pipe."""
    torch.manual_seed(0)
    nets = [Net().double(), Net().double()]
    plain = copy.deepcopy(nets)
    x = torch.randn(6, 4, dtype=torch.float64)

    def loss_of(models: list[Any], rows: Tensor) -> Tensor:
        loss: Tensor = (models[0](rows) - models[1](rows)).square().mean()
        return loss

    expected = loss_of(plain, x)
    expected.backward()  # type: ignore[no-untyped-call]
    pipes = [pipert.pipeline(net, ["second"], devices=devices, chunks=2) for net in nets]
    for pipe in pipes:
        pipe.checkpoint = checkpoint
    loss = pipes[0].forward_backward(
        microbatches=torch.split(x, 2), step=lambda rows: loss_of(nets, rows), schedule=schedule
    )
    for pipe in pipes:
        pipe.close()
    torch.testing.assert_close(loss.cpu(), expected.detach())
    for net, other in zip(nets, plain, strict=True):
        torch.testing.assert_close(grads_of(net), grads_of(other), check_device=False)
