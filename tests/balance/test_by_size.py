"""Tests sizes against those counted by hand, and the balances made from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipert.balance import LayerSize, balance_by_cost, balance_by_size, layer_sizes
from tests.helpers.skip_layers import popping, stashing

FLOAT = 4  # bytes


def sizes(*layers: nn.Module, example: Any = None, **options: Any) -> list[LayerSize]:
    x = torch.ones(10, 3) if example is None else example
    return layer_sizes(nn.Sequential(*layers), x, **options)


def test_parameters_and_buffers_count_and_trained_ones_separately() -> None:
    (size,) = sizes(nn.BatchNorm1d(3))
    assert (size.trained, size.parameters) == (2 * 3 * FLOAT, 4 * 3 * FLOAT + 8)


def test_frozen_parameters_are_not_trained() -> None:
    (size,) = sizes(nn.Linear(3, 5).requires_grad_(False))
    assert (size.parameters, size.trained) == (20 * FLOAT, 0)


def test_a_parameter_of_two_layers_counts_in_the_first() -> None:
    layer = nn.Linear(3, 3)
    assert [size.parameters for size in sizes(layer, layer)] == [12 * FLOAT, 0]


def test_the_output_counts() -> None:
    (size,) = sizes(nn.Linear(3, 5))
    assert (size.inputs, size.activations) == (30 * FLOAT, 50 * FLOAT)


def test_tensors_saved_for_the_backward_count_once() -> None:
    sizes_ = sizes(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5))
    assert sizes_[1].activations == 30 * FLOAT  # its output, which it also saves
    assert sizes_[2].activations == 30 * FLOAT + 30 * FLOAT  # its output, and a mask of floats


def test_a_layer_that_works_in_place_leaves_nothing_new() -> None:
    assert [s.activations for s in sizes(nn.Linear(3, 3), nn.ReLU(inplace=True))][1] == 0


def test_sizes_are_those_of_one_micro_batch() -> None:
    (size,) = sizes(nn.Linear(3, 5), chunks=5)
    assert (size.inputs, size.activations) == (6 * FLOAT, 10 * FLOAT)


def with_skip() -> list[nn.Module]:
    stash = stashing(make=lambda x: torch.cat([x, x]))
    return [stash, popping(take=lambda x, skip: x + skip.sum())]


def test_a_stash_counts_where_it_is_stashed_and_popped() -> None:
    first, last = sizes(*with_skip())
    assert first.activations == 60 * FLOAT
    assert (last.popped, last.inputs) == (60 * FLOAT, 90 * FLOAT)


def test_a_module_on_meta_is_counted_without_memory() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.ReLU())
        example = torch.empty(8, 1 << 20)
    (first, second) = layer_sizes(module, example, device="meta")
    assert (first.parameters, second.activations) == (FLOAT * ((1 << 40) + (1 << 20)), FLOAT << 23)


# What crosses a cut -------------------------------------------------------------------------------


def floats(*layers: nn.Module) -> list[float]:
    return [size.crossing / FLOAT for size in sizes(*layers)]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


def added(x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return x + skip.sum()


def test_the_output_of_the_layer_before_crosses() -> None:
    assert floats(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 9)) == [30, 50, 20]


def test_a_skip_crosses_from_behind_its_stash_up_to_its_pop() -> None:
    pop = popping(take=added)
    layers = nn.Identity(), stashing(make=doubled), nn.Identity(), pop, nn.Identity()
    assert floats(*layers) == [30, 30, 90, 90, 30]


def test_skips_that_overlap_cross_together() -> None:
    stashes = stashing("a", make=doubled), stashing("b")
    pops = popping("b"), popping("a", take=added)
    assert floats(*stashes, *pops) == [30, 30 + 60, 30 + 60 + 30, 30 + 60]


def test_the_balance_cuts_where_no_long_skip_crosses() -> None:
    net = [stashing(make=doubled), nn.Tanh(), nn.Tanh(), popping(take=added), nn.Linear(3, 3)]
    assert balance_by_cost([1] * 5, 2) != [4, 1]
    assert balance_by_cost([1] * 5, 2, crossing=[size / 25 for size in floats(*net)]) == [4, 1]


# The balance --------------------------------------------------------------------------------------


def balance(partitions: int, *layers: nn.Module, example: Any = None, **options: Any) -> list[int]:
    x = torch.ones(10, 3) if example is None else example
    return balance_by_size(partitions, nn.Sequential(*layers), x, **options)


def test_a_larger_optimizer_state_gives_parameters_more_weight() -> None:
    # The last layer has parameters, the first ones activations.
    layers = [*[nn.Tanh() for _ in range(6)], nn.Linear(100, 100)]
    x = torch.ones(100, 100, requires_grad=True)
    assert balance(2, *layers, example=x, param_scale=1) == [4, 3]
    assert balance(2, *layers, example=x, param_scale=4) == [6, 1]


def test_with_many_micro_batches_a_partition_begins_where_little_goes_in() -> None:
    # 'always' keeps the inputs of each micro-batch: narrow is where to cut.
    layers = [nn.Linear(64, 64), nn.Linear(64, 2), nn.Linear(2, 64), nn.Linear(64, 64)]
    layers = [*layers, nn.Linear(64, 64)]
    x = torch.ones(256, 64)
    assert balance(2, *layers, example=x, chunks=64) == [2, 3]


def test_with_many_micro_batches_what_is_popped_counts_for_each_and_no_entry_twice() -> None:
    stash, pop = with_skip()
    layers = [stash, nn.Tanh(), nn.Tanh(), nn.Tanh(), pop]
    assert balance(2, *layers, example=torch.ones(8, 4), chunks=8) == [4, 1]


@pytest.mark.parametrize(
    ("options", "what"), [({"param_scale": 0.5}, "param_scale"), ({"chunks": 0}, "chunks")]
)
def test_a_wrong_option_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        balance(1, nn.ReLU(), **options)
