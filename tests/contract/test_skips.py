"""Tests that a model with skips computes the same in a pipe as plain, in a call and in a step.

Skips go to another partition with their values, and back with their gradients. What may be stashed
is in ``tests/skip/test_values_in_pipe.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import pop, skippable
from tests.helpers.skip_layers import MODELS, Forward, p, s
from tests.helpers.ways import (
    CALL,
    SCHEDULES,
    Way,
    assert_equal,
    batch,
    each_way,
    linear,
    mean,
    piped,
    same,
    take_step,
)
from tests.layers import Apply

BALANCES = [[7], [3, 4], [1, 2, 2, 2], [1, 5, 1], [1] * 7]


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("balance", BALANCES, ids=len)
def test_a_step_is_that_of_the_plain_model(model: str, balance: list[int], way: Way) -> None:
    module = nn.Sequential(*MODELS[model]())
    assert_equal(module, balance, way, batch(7, requires_grad=True))


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("model", ["crossing", "several in one layer"])
@pytest.mark.parametrize(("rows", "chunks"), [(7, 1), (7, 2), (7, 7), (6, 3), (2, 3), (1, 3)])
def test_a_step_equals_the_plain_models_for_every_split(
    rows: int, chunks: int, model: str, way: Way
) -> None:
    module, x = nn.Sequential(*MODELS[model]()), batch(rows)
    assert_equal(module, [1, 2, 1, 3], way, x, chunks=chunks, steps=2)


@each_way
def test_the_value_between_stash_and_pop_may_be_multiplied_by_zero(way: Way) -> None:
    layers = [*MODELS["crossing"](), Apply(lambda x: x * 0), s("z"), nn.Tanh(), p("z")]
    assert_equal(nn.Sequential(*layers), [3, 3, 4, 1], way, batch(4))


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("frozen", [0, 2, 4, 6])
def test_a_layer_may_be_frozen(frozen: int, way: Way) -> None:
    module: Any = nn.Sequential(s("a"), linear(3, 3), s("b"), nn.Tanh(), p("b"), nn.Tanh(), p("a"))
    module[frozen].requires_grad_(False)
    assert_equal(module, [2, 1, 2, 2], way, batch(5, requires_grad=True))
    assert all(parameter.grad is None for parameter in module[frozen].parameters())


@pytest.mark.parametrize("schedule", [CALL, *SCHEDULES])
def test_the_loss_may_need_the_skip_alone(schedule: str) -> None:
    """The last partition's other outputs have no gradient."""
    @skippable(pop=["a"])
    class Beside(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            skip = yield pop("a")
            return x, skip

    module = nn.Sequential(s("a"), linear(3, 3), linear(3, 3), Beside())
    way = Way(schedule, "never")
    assert_equal(module, [1, 1, 1, 1], way, batch(7), loss_fn=lambda y, _: mean(y[1], None))


@each_way
def test_gradients_of_skips_stay_those_of_their_micro_batch(way: Way) -> None:
    """Each row has its own gradient, whatever the order in which micro-batches run backward."""
    module = nn.Sequential(s("a"), linear(3, 3), p("a"), linear(3, 2))
    x = batch(6, requires_grad=True)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64).view(6, 1)

    def loss(y: Tensor, target: Any) -> Any:
        return (y * target).square().sum()

    own = x.detach().clone().requires_grad_()
    loss(module(own), weights).backward()
    reduction: dict[str, Any] = {} if way.schedule == CALL else {"reduction": "sum"}
    with piped(module, [1, 2, 1], way, 6) as pipe:
        take_step(pipe, way, x, target=weights, loss_fn=loss, **reduction)
    same(x.grad, own.grad)
