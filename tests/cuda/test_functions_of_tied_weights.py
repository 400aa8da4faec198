"""Tests custom autograd functions that get a weight which layers on two GPUs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipert

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

ON_TWO: Any = {"devices": ["cuda:0", "cuda:1"], "chunks": 2}
REFUSED = r"Times, an autograd.Function, got a parameter \(float64\[4, 4\]\) of another device"


class Times(torch.autograd.Function):
    """A linear layer; its backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


def itself(weight: Tensor) -> Tensor:
    return weight


def a_view(weight: Tensor) -> Tensor:
    return weight.view_as(weight)


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter, given: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.given = weight, given

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Times.apply(x, self.given(self.weight))  # type: ignore[no-untyped-call]
        return y.tanh()


class Tied(nn.Module):
    """Its own code applies the function to the weight of its first layer."""

    def __init__(self, weight: nn.Parameter, given: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = Layer(weight, itself), nn.Linear(4, 4).double()
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Times.apply(  # type: ignore[no-untyped-call]
            self.second(self.first(x)), self.given(self.first.weight)
        )
        return y.tanh()


def tied(model: str, given: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64) / 2)
    if model == "own code":
        return Tied(weight, given)
    return nn.Sequential(Layer(weight, itself), nn.Linear(4, 4).double(), Layer(weight, given))


def pipe_of(model: str, module: nn.Module, checkpoint: str) -> Any:
    if isinstance(module, nn.Sequential) and model == "Pipe":
        return pipert.Pipe(module, [1, 2], checkpoint=checkpoint, **ON_TWO)
    cut = "1" if model == "layers" else "second"
    return pipert.pipeline(module, [cut], checkpoint=checkpoint, **ON_TWO)


def go_back(pipe: Any, schedule: str | None) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 4, dtype=torch.float64)
    if schedule is None:
        y = pipe(x)
        loss: Any = F.mse_loss(y, torch.zeros_like(y))
        loss.backward()
    else:
        pipe.forward_backward(
            x, target=torch.zeros_like(x), loss_fn=F.mse_loss, schedule=schedule
        )


in_each_way = pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
each_mode = pytest.mark.parametrize("checkpoint", ["never", "always"])
of_each_model = pytest.mark.parametrize("model", ["Pipe", "layers", "own code"])


@of_each_model
@each_mode
@in_each_way
def test_a_function_that_gets_the_weight_of_another_gpu_is_refused(
    model: str, checkpoint: str, schedule: str | None
) -> None:
    with pipe_of(model, tied(model, itself), checkpoint) as pipe:
        with pytest.raises(RuntimeError, match=REFUSED):
            go_back(pipe, schedule)


@of_each_model
@each_mode
@in_each_way
def test_a_function_that_gets_a_view_of_the_weight_has_the_plain_models_gradients(
    model: str, checkpoint: str, schedule: str | None
) -> None:
    plain = tied(model, a_view)
    go_back(plain, None)
    module = tied(model, a_view)
    with pipe_of(model, module, checkpoint) as pipe:
        go_back(pipe, schedule)
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad.cpu(), expected.grad)
