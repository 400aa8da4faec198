"""Tests that optimizers, schedules, accumulation and clipping work as with the plain module.

Each test is a training loop as a user has it. The fixture ``agree`` runs it with the plain model
and in two pipes, and compares what it returns and leaves behind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from pipert import Pipe

Agree = Callable[..., None]

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def batches(count: int, rows: int = 7) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(rows, 6, dtype=torch.double), torch.randn(rows, 3, dtype=torch.double)


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    y = model(x)
    return F.mse_loss(y, target.to(y.device))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> list[float]:
    """The loop of README."""
    losses = []
    for x, target in batches(steps):
        loss = loss_of(model, x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Optimizers ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters, **how: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, **how),
    "AdamW": lambda parameters, **how: AdamW(parameters, lr=0.05, weight_decay=0.1, **how),
}


@modes
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_a_pipe_as_the_module(
    agree: Agree, name: str, how: dict[str, bool], checkpoint: str
) -> None:
    def loop(model: nn.Module) -> list[float]:
        return train(model, OPTIMIZERS[name](model.parameters(), **how))

    agree(loop, checkpoint=checkpoint)


@modes
def test_an_optimizer_with_a_past_goes_on_after_wrapping(checkpoint: str) -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    module = copy.deepcopy(plain)
    optimizers = [AdamW(model.parameters(), lr=0.05) for model in (plain, module)]
    for model, optimizer in zip((plain, module), optimizers, strict=True):
        torch.manual_seed(1)
        train(model, optimizer)
    with Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        pair: tuple[nn.Module, nn.Module] = plain, pipe
        for trained, optimizer in zip(pair, optimizers, strict=True):
            torch.manual_seed(2)
            train(trained, optimizer)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


def test_an_optimizers_state_of_the_module_is_loaded_for_a_pipe_and_back(agree: Agree) -> None:
    def loop(model: nn.Module) -> list[Any]:
        before = Adam(model.parameters(), lr=0.05)
        losses = train(model, before)
        after = Adam(model.parameters(), lr=0.5)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        return [losses, train(model, after), [state["step"] for state in after.state.values()]]

    agree(loop)


def closure_of(
    model: nn.Module, optimizer: Optimizer, x: Tensor, target: Tensor, calls: list[float]
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, x, target)
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    return closure


# LBFGS makes one vector of all gradients, which torch does on one device only.
on_one_device = pytest.mark.parametrize(
    "devices",
    [["cpu", "cpu"], pytest.param(["cuda:0", "cuda:0"], marks=pytest.mark.cuda)],
    ids=["cpu", "cuda"],
)


@modes
@on_one_device
@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_lbfgs_calls_its_closure_as_often_and_gets_as_far(
    agree: Agree, line_search_fn: str | None, checkpoint: str
) -> None:
    def loop(model: nn.Module) -> list[float]:
        optimizer: Any = torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=3, line_search_fn=line_search_fn
        )
        calls: list[float] = []
        for x, target in batches(2):
            optimizer.step(closure_of(model, optimizer, x, target, calls))
        return calls

    agree(loop, checkpoint=checkpoint)


# Clipping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_all_devices(
    agree: Agree, norm_type: float, foreach: bool
) -> None:
    def loop(model: nn.Module) -> list[Tensor]:
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for x, target in batches(3):
            loss_of(model, x, target).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach))
            optimizer.step()
        assert min(norms) > 0.1
        return norms

    agree(loop)
