"""Schedules that a user makes: whatever order they choose, the step is the plain module's."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pipert import Pipe
from pipert.schedules import Action, one_f_one_b
from tests.helpers.ways import MODES, batch, grads_of, linear, mean, same

Tick = list[Action]


def module() -> nn.Sequential:
    return nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 4), linear(4, 2))


def one_by_one(m: int, n: int, placement: tuple[int, ...]) -> Iterator[Tick]:
    """Each micro-batch there and back before the next."""
    for i in range(m):
        yield from ([Action("F", i, j)] for j in range(n))
        yield from _back(i, reversed(range(n)))


def first_to_last(m: int, n: int, placement: tuple[int, ...]) -> Iterator[Tick]:
    """All there, then all back in the order in which they came."""
    for i in range(m):
        yield from ([Action("F", i, j)] for j in range(n))
    for i in range(m):
        yield from _back(i, reversed(range(n)))


def backwards(m: int, n: int, placement: tuple[int, ...]) -> Iterator[Tick]:
    """The last micro-batch first."""
    for i in reversed(range(m)):
        yield from ([Action("F", i, j)] for j in range(n))
    for i in reversed(range(m)):
        yield from _back(i, reversed(range(n)))


def recomputed_early(m: int, n: int, placement: tuple[int, ...]) -> Iterator[Tick]:
    """All recomputations at once."""
    for i in range(m):
        yield from ([Action("F", i, j)] for j in range(n))
    yield from ([Action("R", i, j)] for i in range(m) for j in range(n))
    yield from ([Action("B", i, j)] for i in range(m) for j in reversed(range(n)))


def _back(i: int, partitions: Iterator[int] | list[int]) -> Iterator[Tick]:
    for j in partitions:
        yield [Action("R", i, j)]
        yield [Action("B", i, j)]


SAME_ORDER = [one_by_one, first_to_last, backwards, recomputed_early, one_f_one_b]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("maker", SAME_ORDER)
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]], ids=len)
def test_a_step_by_a_schedule_of_ones_own_is_the_plain_modules(
    maker: object, balance: list[int], checkpoint: str
) -> None:
    _step_is_the_plain_modules(maker, balance, checkpoint)


def _step_is_the_plain_modules(maker: object, balance: list[int], checkpoint: str) -> None:
    piped, x = module(), batch(7, requires_grad=True)
    plain, own = copy.deepcopy(piped), x.detach().clone().requires_grad_()
    devices = ["cpu"] * len(balance)
    with Pipe(piped, balance, devices=devices, chunks=4, checkpoint=checkpoint) as pipe:
        loss = pipe.forward_backward(x, loss_fn=mean, schedule=maker)  # type: ignore[arg-type]
    expected = mean(plain(own), None)
    expected.backward()
    same(loss, expected.detach())
    same(grads_of(piped), grads_of(plain))
    same(x.grad, own.grad)


def test_a_schedule_that_breaks_a_rule_is_refused_before_a_layer_is_called() -> None:
    called = []

    class Called(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            called.append(x)
            return x

    def lacking(m: int, n: int, placement: tuple[int, ...]) -> Iterator[Tick]:
        yield [Action("F", 0, 0)]

    with Pipe(nn.Sequential(Called(), linear(3, 2)), [1, 1], devices=["cpu"] * 2) as pipe:
        with pytest.raises(ValueError, match="is not in it"):
            pipe.forward_backward(batch(2), loss_fn=mean, schedule=lacking)
        assert not called
