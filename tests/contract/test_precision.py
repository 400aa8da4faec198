"""Tests autocast, loss scaling and running statistics in a step, and partly in a call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe
from tests.helpers.ways import CALL, Way, batch, each_way, grads_of, linear, same, take_step

half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
loss_of: Any = F.mse_loss


def perceptron() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 3)
    )


def rows(count: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6), torch.randn(count, 3)


def piped(module: nn.Sequential, way: Way, chunks: int = 3, **options: Any) -> Pipe:
    balance = [2, len(module) - 2]
    mode = way.checkpoint
    return Pipe(module, balance, devices=["cpu"] * 2, chunks=chunks, checkpoint=mode, **options)


# Autocast.


@pytest.mark.pairwise
@half
@each_way
def test_one_micro_batch_under_autocast_has_the_bits_of_the_plain_module(
    dtype: torch.dtype, way: Way
) -> None:
    module, plain = perceptron(), perceptron()
    x, y = rows()
    with piped(module, way, chunks=1) as pipe, torch.autocast("cpu", dtype):
        loss = take_step(pipe, way, x, target=y, loss_fn=loss_of)
    with torch.autocast("cpu", dtype):
        expected = loss_of(plain(x), y)
    expected.backward()
    same(loss, expected.detach(), rtol=0, atol=0)
    same(grads_of(module), grads_of(plain), rtol=0, atol=0)


# Loss scaling.


@pytest.mark.multi_gpu
@pytest.mark.parametrize("home", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("last", ["cpu", "cuda:0", "cuda:1"])
def test_a_loss_scale_may_be_on_any_device_and_be_written_after_the_step(
    last: str, home: str
) -> None:
    def mean_square(y: Tensor, _: None) -> Any:
        return y.square().mean()

    module = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 2))
    plain, x = copy.deepcopy(module), batch(7)
    scale = torch.full((), 8.0, dtype=x.dtype, device=home)
    with Pipe(module, [2, 1], devices=["cuda:0", last], chunks=3) as pipe:
        pipe.forward_backward(x, loss_fn=mean_square, loss_scale=scale)
        scale.fill_(1e6)
    (mean_square(plain(x), None) * 8).backward()
    for parameter, own in zip(module.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        same(parameter.grad.cpu(), own.grad)


class Descent:
    """Plain gradient descent. An optimizer of torch's imports for half a second."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.1)


def train_scaled(module: nn.Module, poisoned: int, step: Any) -> list[float]:
    """Takes four steps, one with infinite inputs; returns the scale after each."""
    torch.manual_seed(6)
    optimizer: Any = Descent(module.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for k in range(4):
        x, y = rows()
        if k == poisoned:
            x[-1] = torch.inf
        step(scaler, x, y)
        scaler.step(optimizer)
        scaler.update()
        module.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.pairwise
@each_way
@pytest.mark.filterwarnings("ignore:the loss is .* for micro-batch:RuntimeWarning")
@pytest.mark.parametrize("poisoned", [-1, 0, 2])
def test_a_grad_scaler_scales_skips_and_grows_as_without_a_pipe(poisoned: int, way: Way) -> None:
    module, plain = perceptron(), perceptron()

    def in_pipe(scaler: Any, x: Tensor, y: Tensor) -> None:
        if way.schedule == CALL:
            scaler.scale(loss_of(pipe(x), y)).backward()
            return
        pipe.forward_backward(
            x, target=y, loss_fn=loss_of, schedule=way.schedule, loss_scale=scaler
        )

    def without(scaler: Any, x: Tensor, y: Tensor) -> None:
        scaler.scale(loss_of(plain(x), y)).backward()

    with piped(module, way) as pipe:
        scales = train_scaled(module, poisoned, in_pipe)
    assert scales == train_scaled(plain, poisoned, without)
    same(dict(module.state_dict()), dict(plain.state_dict()))


# Sums of many micro-batches.


def error(grad_dtype: torch.dtype | None, how: str, chunks: int) -> float:
    """Returns the relative error of bfloat16 weights' gradients; plain, if there is no ``how``."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).bfloat16()
    exact = copy.deepcopy(module).double()
    for parameter in module.parameters():
        parameter.grad_dtype = grad_dtype or parameter.dtype
    x, target = torch.randn(128, 8).bfloat16(), torch.randn(128, 8)

    def loss_of(y: Tensor, target: Tensor) -> Any:
        return F.mse_loss(y.to(torch.promote_types(y.dtype, torch.float32)), target)

    loss_of(exact(x.double()), target.double()).backward()
    if how:
        with Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=chunks) as pipe:
            take_step(pipe, Way(how, "except_last"), x, target=target, loss_fn=loss_of)
    else:
        loss_of(module(x), target).backward()
    found, expected = (
        torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
        for model in (module, exact)
    )
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])
def test_gradients_in_float32_keep_the_precision_of_the_plain_module(how: str) -> None:
    plain = error(None, "", 1)
    assert error(torch.float32, how, 128) < 1.5 * plain
    assert error(None, how, 128) > 2 * plain
