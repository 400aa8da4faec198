"""A model with skips computes in a Pipe what it computes as a plain Sequential."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.ways import CALL, Way, assert_equal, grads_of, same
from tests.pipes import pipe_of
from tests.skips import MODELS

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])

BALANCES = [[7], [1] * 7, [3, 4], [1, 5, 1], [2, 2, 2, 1]]
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
balances = pytest.mark.parametrize("balance", BALANCES, ids=str)


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


# Training -----------------------------------------------------------------------------------------


@modes
def test_a_call_may_have_no_rows(checkpoint: str) -> None:
    model, x = nn.Sequential(*MODELS["crossing"]()), batch(0)
    way = Way(CALL, checkpoint)
    assert_equal(model, [1, 2, 1, 3], way, x, loss_fn=lambda y, _: y.square().sum())


@modes
def test_steps_of_different_sizes_and_modes_follow_each_other(checkpoint: str) -> None:
    model = nn.Sequential(*MODELS["nested"]())
    plain = copy.deepcopy(model)
    with pipe_of(model, [2, 2, 3], chunks=3, checkpoint=checkpoint) as pipe:
        for rows in (4, 1, 9):
            x = batch(rows)
            with torch.no_grad():
                same(pipe(x), plain(x))
            for one in (pipe, plain):
                one(x).square().sum().backward()  # gradients add up in both
            same(grads_of(pipe), grads_of(plain))


# Other ways to ask for gradients ------------------------------------------------------------------


@modes
def test_autograd_grad_gives_the_same_and_touches_no_grad(checkpoint: str) -> None:
    model, x = nn.Sequential(*MODELS["crossing"]()), batch(5)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with pipe_of(model, [1, 2, 1, 3], chunks=2, checkpoint=checkpoint) as pipe:
        same(torch.autograd.grad(pipe(x).sum(), list(pipe.parameters())), expected)
        assert all(parameter.grad is None for parameter in pipe.parameters())


@modes
def test_the_gradient_of_the_stashing_layer_alone_is_the_same(checkpoint: str) -> None:
    model, x = nn.Sequential(*MODELS["nested"]()), batch(5)
    wanted = list(model[0].parameters())
    expected = torch.autograd.grad(model(x).sum(), wanted)
    with pipe_of(model, [1, 3, 3], chunks=2, checkpoint=checkpoint) as pipe:
        same(torch.autograd.grad(pipe(x).sum(), wanted), expected)


@modes
def test_a_second_backward_adds_the_same_gradients(checkpoint: str) -> None:
    model, x = nn.Sequential(*MODELS["crossing"]()), batch(5)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with pipe_of(model, [1, 2, 1, 3], chunks=2, checkpoint=checkpoint) as pipe:
        loss = pipe(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        same([parameter.grad for parameter in pipe.parameters()], [2 * grad for grad in expected])


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


def test_a_model_may_be_frozen_as_a_whole() -> None:
    model, x = nn.Sequential(*MODELS["nested"]()).requires_grad_(False), batch(5)
    with pipe_of(model, [2, 3, 2], chunks=2) as pipe:
        output = pipe(x)
    assert not output.requires_grad
    same(output, model(x))
