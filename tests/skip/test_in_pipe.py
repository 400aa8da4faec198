"""A model with skips computes in a Pipe what it computes as a plain Sequential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.pipes import pipe_of
from tests.helpers.skip_layers import MODELS
from tests.helpers.ways import same

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])

BALANCES = [[7], [1] * 7, [3, 4], [1, 5, 1], [2, 2, 2, 1]]
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
balances = pytest.mark.parametrize("balance", BALANCES, ids=str)


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


# Other ways to ask for gradients ------------------------------------------------------------------


@modes
def test_autograd_grad_gives_the_same_and_touches_no_grad(checkpoint: str) -> None:
    model, x = nn.Sequential(*MODELS["crossing"]()), batch(5)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with pipe_of(model, [1, 2, 1, 3], chunks=2, checkpoint=checkpoint) as pipe:
        same(torch.autograd.grad(pipe(x).sum(), list(pipe.parameters())), expected)
        assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_gradient_of_the_gradient_is_the_same_without_checkpointing() -> None:
    model, x = nn.Sequential(*MODELS["crossing"]()), batch(4)
    expected = second_order(model, x)
    with pipe_of(model, [1, 2, 1, 3], chunks=2, checkpoint="never") as pipe:
        same(second_order(pipe, x), expected)


def second_order(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    own = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(own).sum(), own, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), list(module.parameters()), allow_unused=True)


# Without gradients --------------------------------------------------------------------------------


@pytest.mark.pairwise
@models
@balances
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_output_without_grad_is_that_of_the_plain_model(
    make: Callable[[], list[nn.Module]], balance: list[int], mode: Callable[[], Any]
) -> None:
    model, x = nn.Sequential(*make()), batch(5)
    with mode(), pipe_of(model, balance, chunks=2) as pipe:
        output = pipe(x)
        same(output, model(x))
        assert not output.requires_grad
