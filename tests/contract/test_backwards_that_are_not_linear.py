"""Tests backwards that are not linear in the gradient that they get.

A gradient enters each of them as the plain module's does, for the rows of a micro-batch: already
multiplied by the share in the mini-batch's loss, by ``loss_scale``, and divided by the denominator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.ways import (
    CALL,
    Way,
    assert_equal,
    batch,
    each_way,
    grads_of,
    linear,
    piped,
    same,
)

ROWS = 7  # in micro-batches of 3, 2 and 2 rows


class Inject(torch.autograd.Function):
    """Returns ``x``, and adds the gradient of ``weight * balance`` to that of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, balance: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy, dy.new_tensor(ctx.weight), None


class Experts(nn.Module):
    """Two experts, with a balance loss that is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = linear(3, 2), linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        shares = self.router(x).softmax(-1)
        x = Inject.apply(x, shares.square().sum(), 0.01)  # type: ignore[no-untyped-call]
        return self.expert(x) * shares.amax(-1, keepdim=True)


class Hooked(nn.Module):
    """Changes the gradient of its output by a hook, row by row."""

    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.hook = linear(3, 3), hook

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        return y


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "injected": Experts,
    "clamped": lambda: Hooked(lambda dy: dy.clamp(-0.01, 0.01)),
    "signs": lambda: Hooked(lambda dy: dy.sign()),
    "rows of length one": lambda: Hooked(lambda dy: nn.functional.normalize(dy, dim=1)),
}
layers = pytest.mark.parametrize("layer", LAYERS)


def model(layer: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(linear(3, 3), LAYERS[layer](), linear(3, 3), LAYERS[layer]())


@layers
@each_way
def test_gradients_are_the_plain_module_s(way: Way, layer: str) -> None:
    assert_equal(model(layer), [2, 2], way, batch(ROWS, True))


@layers
def test_a_denominator_and_a_scale_have_been_applied(layer: str) -> None:
    module, x = model(layer), batch(ROWS)
    plain = copy.deepcopy(module)
    torch.autograd.backward(plain(x).square().sum() / 5 * 64)
    with piped(module, [2, 2], Way("1f1b", "never")) as pipe:
        pipe.forward_backward(
            x, loss_fn=lambda y, _: y.square().sum(), denominator=5, loss_scale=64.0
        )
    same(grads_of(module), grads_of(plain))


class BalancedOnAverage(Experts):
    """The same with a mean over rows, which a pipe injects for each micro-batch."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Any:
        shares = self.router(x).softmax(-1)
        weight = 0.01 * self.times
        x = Inject.apply(x, shares.square().sum(1).mean(), weight)  # type: ignore[no-untyped-call]
        return self.expert(x) * shares.amax(-1, keepdim=True)


@pytest.mark.parametrize("schedule", [CALL, "gpipe", "1f1b"])
def test_a_mean_over_rows_is_injected_once_for_each_micro_batch(schedule: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(BalancedOnAverage(1 / 3), linear(3, 3)), batch(6)
    plain = copy.deepcopy(module)
    first: Any = plain[0]
    first.times = 1.0
    torch.autograd.backward(plain(x).square().mean())
    with piped(module, [1, 1], Way(schedule, "never")) as pipe:
        if schedule == CALL:
            torch.autograd.backward(pipe(x).square().mean())
        else:
            pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean(), schedule=schedule)
    same(grads_of(module), grads_of(plain))
