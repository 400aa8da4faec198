"""Tests that a step equals the plain module's forward and ``loss.backward()``.

``tests/contract`` has what holds for a call as well.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.ways import (
    Way,
    assert_equal,
    batch,
    grads_of,
    linear,
    mean,
    piped,
    same,
    seven_layers,
    take_step,
    ways,
)


@ways
def test_grad_is_added_to_in_place(way: Way) -> None:
    module = seven_layers()
    with piped(module, [3, 4], way) as pipe:
        take_step(pipe, way, batch(7))
        before = [p.grad for p in module.parameters()]
        take_step(pipe, way, batch(7))
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))


# Reductions.


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_reduction_sum_adds_the_losses_of_the_micro_batches(way: Way, rows: int) -> None:
    module, x = seven_layers(), batch(rows, requires_grad=True)
    plain, own = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with piped(module, [3, 4], way) as pipe:
        loss = take_step(pipe, way, x, loss_fn=lambda y, _: y.square().sum(), reduction="sum")
    expected = plain(own).square().sum()
    expected.backward()
    same(loss, expected.detach())
    same(grads_of(module), grads_of(plain))
    same(x.grad, own.grad)


@ways
def test_reduction_mean_weighs_by_rows_where_micro_batches_differ(way: Way) -> None:
    """7 rows in 3 micro-batches: 3, 2 and 2. The mean of the means would be another number."""
    rows = torch.arange(7, dtype=torch.float64).view(7, 1)
    module = nn.Sequential(nn.Identity(), linear(1, 1))
    with piped(module, [1, 1], way) as pipe:
        loss = take_step(pipe, way, rows, loss_fn=lambda y, t: (y * 0 + t).mean(), target=rows)
    same(loss.item(), 3.0)


# Losses.


class Scaled(nn.Module):
    """A loss that learns something itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * self.scale - target).square().mean()


def weighted(weight: float, output: Tensor, target: Tensor) -> Tensor:
    return weight * (output - target).abs().mean()


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "functional": F.mse_loss,
    "partial of functional": functools.partial(F.smooth_l1_loss, beta=0.1),
    "module": nn.MSELoss(),
    "partial": functools.partial(weighted, 3.0),
    "lambda": lambda y, t: (y * t).mean(),
    "of shape (1,)": lambda y, t: (y * t).mean().view(1),
    "of shape (1, 1)": lambda y, t: (y * t).mean().view(1, 1),
}


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("kind", LOSSES)
def test_any_function_of_output_and_target_may_be_the_loss(kind: str, way: Way) -> None:
    module, x = seven_layers(), batch(7)
    target = torch.randn(7, 2, dtype=torch.float64)
    assert_equal(module, [3, 4], way, x, target=target, loss_fn=LOSSES[kind])


@ways
def test_a_loss_with_parameters_gets_their_gradients(way: Way) -> None:
    module, loss, x = seven_layers(), Scaled(), batch(7)
    target = torch.randn(7, 2, dtype=torch.float64)
    plain, plain_loss = copy.deepcopy(module), copy.deepcopy(loss)
    with piped(module, [3, 4], way) as pipe:
        for _ in range(2):
            take_step(pipe, way, x, target=target, loss_fn=loss)
            plain_loss(plain(x), target).backward()
    same(grads_of(loss), grads_of(plain_loss))
    same(grads_of(module), grads_of(plain))


@ways
def test_a_loss_may_use_parameters_of_the_model(way: Way) -> None:
    """As weight decay does. Then a gradient comes from two partitions."""
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)

    def decayed(of: Any) -> Callable[[Tensor, Any], Any]:
        return lambda y, _: mean(y, None) + of[0].weight.square().sum()

    with piped(module, [3, 4], way) as pipe:
        take_step(pipe, way, x, loss_fn=decayed(module))
    decayed(plain)(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))
