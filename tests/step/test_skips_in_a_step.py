"""Skips of a step go to another partition with their values, and back with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import Namespace, pop, skippable, stash
from tests.contract.ways import SCHEDULES, Way, assert_equal, batch, linear, mean, ways
from tests.layers import Apply
from tests.skips import Forward, Pop, Stash, identity, popping, stashing


class Times(nn.Module):
    """Multiplies what ``take`` makes of a skip with its input, and adds what its layer does."""

    def __init__(self, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.aside, self.take = linear(3, 3), take

    def forward(self, x: Tensor, value: Any) -> Tensor:
        skip = self.take(value)
        return x if skip is None else x * skip + self.aside(skip)


def s(*names: str, make: Callable[[Tensor], Any] = torch.tanh, count: int = 1) -> Stash:
    aside = nn.Sequential(linear(3, 3), Apply(make))
    return stashing(*names, make=aside, after=linear(3, 3), count=count)


def p(*names: str, take: Callable[[Any], Any] = identity) -> Pop:
    return popping(*names, take=Times(take))


def isolated() -> list[nn.Module]:
    first, second = Namespace(), Namespace()
    return [
        s("a").isolate(first), s("a").isolate(second), nn.Tanh(), p("a").isolate(first),
        linear(3, 3), p("a").isolate(second), nn.Tanh(),
    ]  # fmt: skip


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "nested": lambda: [s("a"), nn.Tanh(), s("b"), linear(3, 3), p("b"), nn.Tanh(), p("a")],
    "crossing": lambda: [s("a"), s("b"), nn.Tanh(), p("a"), linear(3, 3), p("b"), nn.Tanh()],
    "popped four times": lambda: [
        s("a", count=4), p("a"), linear(3, 3), p("a"), p("a"), nn.Tanh(), p("a")
    ],
    "two of one layer": lambda: [
        linear(3, 3), s("a", "b"), nn.Tanh(), p("b"), nn.Tanh(), linear(3, 3), p("a")
    ],
    "two to one layer": lambda: [
        s("a"), nn.Tanh(), s("b"), linear(3, 3), nn.Tanh(), p("a", "b"), nn.Tanh()
    ],
    "namespaces": isolated,
}
BALANCES = [[7], [3, 4], [1, 2, 2, 2], [1] * 7]


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("balance", BALANCES, ids=len)
def test_a_step_is_that_of_the_plain_model(model: str, balance: list[int], way: Way) -> None:
    module = nn.Sequential(*MODELS[model]())
    assert_equal(module, balance, way, batch(7, requires_grad=True))


@ways
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_a_step_is_that_of_the_plain_model_however_it_is_split(chunks: int, way: Way) -> None:
    module = nn.Sequential(*MODELS["popped four times"]())
    assert_equal(module, [2, 1, 2, 2], way, batch(7), chunks=chunks, steps=2)


VALUES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "a tuple": (lambda x: (x.sin(), x.cos()), lambda v: v[0] * v[1]),
    "one of two unused": (lambda x: {"a": x.sin(), "b": x.cos()}, lambda v: v["b"]),
    "a tensor and an integer one": (lambda x: (x, x.argmax(1)), lambda v: v[0] + v[1][:, None]),
    "a number and None": (lambda x: (2, None, x), lambda v: v[0] * v[2]),
    "detached": (torch.detach, lambda v: v),
    "popped and unused": (torch.exp, lambda v: None),
    "one twice": (lambda x: (x, x), lambda v: v[0] * v[1].exp()),
}


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]], ids=len)
def test_a_skip_may_be_any_value(kind: str, balance: list[int], way: Way) -> None:
    make, take = VALUES[kind]
    module = nn.Sequential(s("a", make=make), nn.Tanh(), p("a", take=take), linear(3, 2))
    assert_equal(module, balance, way, batch(7))


@ways
def test_a_gradient_may_come_back_by_the_skip_alone(way: Way) -> None:
    """Between the two the graph is cut."""
    module = nn.Sequential(s("a"), nn.ReLU(), Cut(), p("a"), linear(3, 2))
    assert_equal(module, [1, 1, 1, 2], way, batch(7, requires_grad=True))


@ways
def test_partitions_in_between_may_be_frozen(way: Way) -> None:
    module = nn.Sequential(s("a"), linear(3, 3), linear(3, 3), p("a"), linear(3, 2))
    module[1].requires_grad_(False)
    module[2].requires_grad_(False)
    assert_equal(module, [1, 1, 1, 2], way, batch(7))


@ways
def test_the_partition_that_stashes_may_be_frozen(way: Way) -> None:
    module = nn.Sequential(s("a"), linear(3, 3), p("a"), linear(3, 2))
    module[0].requires_grad_(False)
    assert_equal(module, [1, 1, 2], way, batch(7))


@ways
def test_a_skip_of_the_input_itself_comes_back_to_it(way: Way) -> None:
    @skippable(stash=["a"])
    class Aside(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x)
            return x.exp()

    module = nn.Sequential(Aside(), linear(3, 3), nn.Tanh(), p("a"))
    assert_equal(module, [1, 1, 1, 1], way, batch(7, requires_grad=True))


@ways
def test_a_parameter_may_be_stashed(way: Way) -> None:
    @skippable(stash=["a"])
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Forward:
            yield stash("a", self.weight)
            return x * self.weight

    module = nn.Sequential(linear(3, 3), Own(), nn.Tanh(), p("a"))
    assert_equal(module, [1, 1, 1, 1], way, batch(7))


class Cut(nn.Module):
    """Ends the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_may_need_the_skip_alone(schedule: str) -> None:
    """What else the last partition returns has no gradient."""
    @skippable(pop=["a"])
    class Beside(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            skip = yield pop("a")
            return x, skip

    module = nn.Sequential(s("a"), linear(3, 3), linear(3, 3), Beside())
    way = Way(schedule, "never")
    assert_equal(module, [1, 1, 1, 1], way, batch(7), loss_fn=lambda y, _: mean(y[1], None))


@ways
def test_gradients_of_skips_stay_those_of_their_micro_batch(way: Way) -> None:
    """Each row has a gradient of its own, in whatever order the micro-batches go back."""
    module = nn.Sequential(s("a"), linear(3, 3), p("a"), linear(3, 2))
    x = batch(6, requires_grad=True)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64).view(6, 1)

    def loss(y: Tensor, target: Any) -> Any:
        return (y * target).square().sum()

    own = x.detach().clone().requires_grad_()
    loss(module(own), weights).backward()
    with Pipe(module, [1, 2, 1], devices=["cpu"] * 3, chunks=6, checkpoint=way.checkpoint) as pipe:
        pipe.forward_backward(
            x, target=weights, loss_fn=loss, schedule=way.schedule, reduction="sum"
        )
    torch.testing.assert_close(x.grad, own.grad)
