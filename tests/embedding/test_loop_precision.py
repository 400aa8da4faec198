"""Tests ``GradScaler`` in a training loop, and gradients in float32 of weights in bfloat16.

``tests/contract`` has autocast, and scaled steps. A pipe with one micro-batch computes what the
module computes, so half precision is compared exactly.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from pipert import Pipe

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
mse_loss: Any = F.mse_loss  # torch does not type Tensor.backward


def perceptron() -> nn.Sequential:
    layers = [nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randn(rows, 3)


def in_pipe(module: nn.Sequential, devices: list[str], **options: Any) -> Pipe:
    return Pipe(module, [3, 2], devices=devices, **options)


def loss_under_autocast(
    model: nn.Module, device: torch.device, dtype: torch.dtype, x: Tensor, target: Tensor
) -> Any:
    """Computes the loss of a model that begins on ``device``, under autocast."""
    with torch.autocast(device.type, dtype):
        y = model(x.to(device))
        return mse_loss(y, target.to(y.device))


@pytest.fixture(
    params=[
        pytest.param(["cpu", "cpu"], id="cpu"),
        pytest.param(["cuda:0", "cuda:0"], id="cuda", marks=pytest.mark.cuda),
        pytest.param(["cuda:0", "cuda:1"], id="cuda,cuda", marks=pytest.mark.multi_gpu),
    ]
)
def devices(request: pytest.FixtureRequest) -> list[str]:
    """Of one kind, as autocast is; the plain model is on the first of them."""
    found: list[str] = request.param
    return found


def first_of(devices: list[str]) -> torch.device:
    return torch.device(devices[0])


def assert_equal_weights(module: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(value.cpu(), expected[name].cpu()), name


# GradScaler ---------------------------------------------------------------------------------------


def scaler_for(device: torch.device, **how: Any) -> torch.amp.GradScaler:
    """Makes a scaler that grows within the steps of these tests."""
    return torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2, **how)


Batches = list[tuple[Tensor, Tensor]]


def train_scaled(
    model: nn.Module, device: torch.device, batches: Batches, max_norm: float | None = None
) -> list[Any]:
    """The loop of torch's notes on mixed precision; what each step leaves."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler, steps = scaler_for(device), []
    for x, target in batches:
        optimizer.zero_grad()
        loss = loss_under_autocast(model, device, torch.float16, x, target)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        steps.append([loss.item(), scaler.get_scale()])
    return steps


def with_an_overflow() -> Batches:
    """The third of five mini-batches has gradients that are not finite."""
    batches = [batch() for _ in range(5)]
    batches[2][1][6, 0] = float("inf")
    return batches


@modes
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_scaled_training_with_a_skipped_step_is_the_modules(
    devices: list[str], checkpoint: str, max_norm: float | None
) -> None:
    device = first_of(devices)
    plain = perceptron().to(device)
    module = copy.deepcopy(plain)
    batches = with_an_overflow()
    expected = train_scaled(plain, device, batches, max_norm)
    with in_pipe(module, devices, checkpoint=checkpoint) as pipe:
        found = train_scaled(pipe, device, batches, max_norm)
    if max_norm is not None and len(set(devices)) > 1:
        # The norm is taken of those of each device, which torch puts in no certain order.
        torch.testing.assert_close(found, expected)
        return
    assert found == expected
    assert_equal_weights(module, plain)


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu", "cpu"],
        pytest.param(["cuda:0", "cpu"], marks=pytest.mark.cuda),
        pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.multi_gpu),
    ],
    ids=",".join,
)
def test_scaled_gradients_of_several_devices_are_unscaled(devices: list[str]) -> None:
    module = perceptron()
    plain = copy.deepcopy(module)
    x, target = batch()
    mse_loss(plain(x), target).backward()
    with in_pipe(module, devices, chunks=3) as pipe:
        optimizer = SGD(pipe.parameters(), lr=0.1)
        scaler = scaler_for(pipe.devices[-1])
        y = pipe(x)
        scaler.scale(mse_loss(y, target.to(y.device))).backward()
        scaler.unscale_(optimizer)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), q.grad)


# Sums of many micro-batches -----------------------------------------------------------------------


def error(grad_dtype: torch.dtype | None, how: str, chunks: int) -> float:
    """Returns the relative error of bfloat16 weights' gradients; plain, if there is no ``how``."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).bfloat16()
    exact = copy.deepcopy(module).double()
    for parameter in module.parameters():
        parameter.grad_dtype = grad_dtype or parameter.dtype
    x, target = torch.randn(128, 8).bfloat16(), torch.randn(128, 8)

    def loss_of(y: Tensor, target: Tensor) -> Any:
        return mse_loss(y.to(torch.promote_types(y.dtype, torch.float32)), target.to(y.device))

    loss_of(exact(x.double()), target.double()).backward()
    if how:
        with Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=chunks) as pipe:
            if how == "call":
                loss_of(pipe(x), target).backward()
            else:
                pipe.forward_backward(x, target=target, loss_fn=loss_of, schedule=how)
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
