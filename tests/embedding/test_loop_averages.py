"""Tests averages of weights: EMA and SWA of the pipe and its module, and copies in training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, swa_utils
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from pipert import Pipe

# What torch does not type.
mse_loss: Any = F.mse_loss
get_ema_multi_avg_fn: Any = swa_utils.get_ema_multi_avg_fn

Agree = Callable[..., None]

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])

AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "own function": {"avg_fn": lambda average, p, count: 0.5 * average + 0.5 * p},
}

averages = pytest.mark.parametrize("how", AVERAGES)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(7, 6, dtype=torch.double), torch.randn(7, 3, dtype=torch.double)


def step(model: nn.Module, optimizer: SGD, x: Tensor, target: Tensor) -> None:
    optimizer.zero_grad()
    y = model(x)
    mse_loss(y, target.to(y.device)).backward()
    optimizer.step()


def done_with(average: AveragedModel) -> None:
    """The average of a pipe is a copy of it, with threads of its own."""
    if isinstance(average.module, Pipe):
        average.module.close()


@averages
@modes
def test_an_average_of_a_pipe_is_that_of_the_module(
    agree: Agree, how: str, checkpoint: str
) -> None:
    def loop(model: nn.Module) -> list[Any]:
        average = AveragedModel(model, **AVERAGES[how])
        optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
        outputs = []
        for x, target in batches(3):
            step(model, optimizer, x, target)
            average.update_parameters(model)
            with torch.no_grad():
                outputs.append(average(x))
        done_with(average)
        return [outputs, average.state_dict()]

    agree(loop, checkpoint=checkpoint)


def test_the_state_of_an_average_of_a_pipe_loads_into_one_of_the_module() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    plain = AveragedModel(copy.deepcopy(module))
    with Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        average = AveragedModel(pipe)
        step(pipe, SGD(pipe.parameters(), lr=0.2), *next(batches(1)))
        average.update_parameters(pipe)
        plain.load_state_dict(average.state_dict())
        x, _ = next(batches(1))
        with torch.no_grad():
            torch.testing.assert_close(plain(x), average(x))
        done_with(average)


def test_stochastic_weight_averaging_with_its_schedule_is_the_modules(agree: Agree) -> None:
    def loop(model: nn.Module) -> list[Any]:
        average = AveragedModel(model)
        optimizer = SGD(model.parameters(), lr=0.4)
        schedule = SWALR(optimizer, swa_lr=0.1, anneal_epochs=2)
        for x, target in batches(4):
            step(model, optimizer, x, target)
            schedule.step()
            average.update_parameters(model)
        done_with(average)
        return [average.state_dict(), optimizer.param_groups[0]["lr"]]

    agree(loop)


def test_update_bn_gives_a_pipe_with_deferred_statistics_those_of_the_module() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    module, data = copy.deepcopy(plain), [x for x, _ in batches(3)]
    update_bn(data, plain)
    with Pipe(
        module, [1, 1], devices=["cpu"] * 2, chunks=3, deferred_batch_norm=True
    ) as pipe:
        update_bn(data, pipe)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
