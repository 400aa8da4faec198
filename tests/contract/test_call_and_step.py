"""Tests rows 1 and 2 of the equivalence contract, for a call and for a step.

``test_calls_alone.py`` has what holds for a call alone, ``tests/step`` what does for a step.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.contract.ways import (
    CALL,
    MODES,
    Way,
    assert_equal,
    batch,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    seven_layers,
    take_step,
)
from tests.layers import Apply

# Each balance but the first starts a partition with the in-place layer.
BALANCES = [[7], [3, 4], [2, 1, 4], [1] * 7]
CHUNKS = [1, 3, 4]
ROWS = [7, 6, 2, 1]


class Case(NamedTuple):
    balance: list[int]
    chunks: int
    rows: int


CASES = [Case(b, c, r) for b in BALANCES for c in CHUNKS for r in ROWS]
cases = pytest.mark.parametrize(
    "case", CASES, ids=[f"n={len(c.balance)}-chunks={c.chunks}-{c.rows} rows" for c in CASES]
)


# Row 1: partitions x micro-batches x rows.


@pytest.mark.pairwise
@each_way
@cases
def test_loss_and_gradients_are_the_plain_modules(case: Case, way: Way) -> None:
    x = batch(case.rows, requires_grad=True)
    assert_equal(seven_layers(), case.balance, way, x, chunks=case.chunks)


@pytest.mark.pairwise
@each_way
@cases
def test_outputs_are_the_plain_modules(case: Case, way: Way) -> None:
    module, x = seven_layers(), batch(case.rows)
    plain = copy.deepcopy(module)
    with piped(module, case.balance, way, case.chunks) as pipe:
        _, outputs = take_step(pipe, way, x, return_outputs=True)
    same(outputs, plain(x).detach())


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("chunks", CHUNKS)
def test_gradients_accumulate(way: Way, chunks: int) -> None:
    x = batch(7, requires_grad=True)
    assert_equal(seven_layers(), [2, 1, 4], way, x, chunks=chunks, steps=3)


@each_way
def test_steps_may_have_any_rows_one_after_the_other(way: Way) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    with piped(module, [3, 4], way) as pipe:
        for rows in (7, 1, 12, 2):
            x = batch(rows)
            take_step(pipe, way, x)
            mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


# Row 2: what is frozen.

FROZEN: dict[str, list[int]] = {
    "nothing": [],
    "first layer": [0],
    "middle layer": [2],
    "last layer": [6],
    "first partition": [0, 2],
    "last partition": [4, 5, 6],
    "all but the first layer": [2, 4, 5, 6],
    "all but the last layer": [0, 2, 4, 5],
}


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_frozen_parameters_have_no_grad_and_the_others_the_plain_modules(
    chunks: int, frozen: str, requires_grad: bool, way: Way
) -> None:
    module = seven_layers()
    for index in FROZEN[frozen]:
        module[index].requires_grad_(False)
    assert_equal(module, [3, 4], way, batch(7, requires_grad), chunks=chunks)


@pytest.mark.pairwise
@pytest.mark.parametrize("frozen", [*FROZEN.values(), [0, 2, 4, 5, 6]], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("checkpoint", MODES)
def test_the_output_of_a_call_requires_grad_when_the_plain_modules_does(
    checkpoint: str, chunks: int, requires_grad: bool, frozen: list[int]
) -> None:
    module, x = seven_layers(), batch(7, requires_grad)
    for index in frozen:
        module[index].requires_grad_(False)
    with piped(module, [3, 4], Way(CALL, checkpoint), chunks) as pipe:
        assert pipe(x).requires_grad == module(x).requires_grad


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_call_may_have_everything_frozen(checkpoint: str, requires_grad: bool) -> None:
    module = seven_layers().requires_grad_(False)
    assert_equal(module, [3, 4], Way(CALL, checkpoint), batch(7, requires_grad))
    assert set(grads_of(module).values()) == {None}


@each_way
def test_a_parameter_that_the_loss_does_not_depend_on_has_no_grad(way: Way) -> None:
    """Its partition runs backward, but its layer does not."""
    module: Any = nn.Sequential(
        linear(3, 3), Apply(lambda x: (x, x)), Both(linear(3, 2), linear(3, 4)), nn.Identity()
    )
    assert_equal(module, [2, 2], way, batch(7), loss_fn=lambda y, _: mean(y[0], None))
    assert module[2].second.weight.grad is None


class Both(nn.Module):
    """A module with one layer for each of two values."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.first(value[0]), self.second(value[1])


@each_way
def test_parameters_before_a_cut_in_the_graph_get_no_grad(way: Way) -> None:
    module = nn.Sequential(linear(3, 4), nn.Tanh(), Apply(torch.detach), linear(4, 2))
    assert_equal(module, [2, 2], way, batch(7, requires_grad=True))
    assert module[0].weight.grad is None
