"""Tests the sizes of transfers before each layer against those counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipert.balance import Arguments, balance_by_cost, crossing_sizes
from tests.layers import Apply
from tests.skips import identity, popping, stashing

FLOAT = 4  # bytes


def floats(*layers: nn.Module, example: Any = None, **options: Any) -> list[float]:
    """Returns the sizes in floats."""
    x = torch.ones(10, 3) if example is None else example
    return [size / FLOAT for size in crossing_sizes(nn.Sequential(*layers), x, **options)]


def test_the_output_of_the_layer_before_crosses() -> None:
    assert floats(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 9)) == [0, 50, 20]


def test_each_tensor_of_a_value_crosses() -> None:
    assert floats(Apply(lambda x: {"a": x, "b": [x + 1, 7]}), Apply(lambda v: v["a"])) == [0, 60]


def test_a_tensor_that_a_value_has_twice_crosses_once() -> None:
    assert floats(Apply(lambda x: (x, x)), Apply(lambda v: v[0])) == [0, 30]


def test_a_view_crosses_with_its_own_elements_only() -> None:
    assert floats(Apply(lambda x: x[:2]), Apply(identity)) == [0, 6]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


def added(x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return x + skip.sum()


def test_a_skip_crosses_from_behind_its_stash_up_to_its_last_pop() -> None:
    stash = stashing(make=doubled, count=2)
    pops = popping(take=added), nn.Identity(), popping(take=added)
    layers = nn.Identity(), stash, nn.Identity(), *pops, nn.Identity()
    assert floats(*layers) == [0, 30, 90, 90, 90, 90, 30]


def test_skips_that_overlap_cross_together() -> None:
    stashes = stashing("a", make=doubled), stashing("b")
    pops = popping("b"), popping("a", take=added)
    assert floats(*stashes, *pops) == [0, 30 + 60, 30 + 60 + 30, 30 + 60]


def test_a_skip_that_no_other_layer_pops_does_not_cross() -> None:
    both = nn.Sequential(stashing(), popping())
    assert floats(both, nn.Tanh()) == [0, 30]


def test_a_layer_may_take_several_arguments() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    x = torch.ones(10, 3)
    assert floats(Add(), nn.Identity(), example=Arguments((x,), {"y": x})) == [0, 30]


def test_a_module_on_meta_is_counted_without_memory() -> None:
    with torch.device("meta"):
        layers = nn.Linear(1 << 20, 1 << 20), nn.ReLU()
        example = torch.empty(8, 1 << 20)
    assert floats(*layers, example=example, device="meta") == [0, 1 << 23]


def test_the_balance_cuts_where_no_long_skip_crosses() -> None:
    net = [stashing(make=doubled), nn.Tanh(), nn.Tanh(), popping(take=added), nn.Linear(3, 3)]
    sizes = crossing_sizes(nn.Sequential(*net), torch.ones(10, 3))
    costs = [1, 1, 1, 1, 1]
    assert balance_by_cost(costs, 2) != [4, 1]
    assert balance_by_cost(costs, 2, crossing=[size / 100 for size in sizes]) == [4, 1]
