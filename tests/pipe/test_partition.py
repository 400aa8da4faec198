"""Tests splitting a Sequential into partitions and placing them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from pipert.layers.random_numbers import draws
from pipert.model.split import check_module, place, split

CPU, META = torch.device("cpu"), torch.device("meta")


def split_to(
    module: nn.Sequential, balance: list[int], devices: list[torch.device]
) -> tuple[nn.Sequential, ...]:
    partitions = split(module, balance)
    place(partitions, devices)
    return partitions


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])


def test_layers_keep_their_names() -> None:
    module = nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.ReLU(), c=nn.ReLU()))
    names = [[n for n, _ in p.named_children()] for p in split_to(module, [2, 1], [CPU, CPU])]
    assert names == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook,
        nn.Module.register_backward_hook,
    ],
)  # fmt: skip
def test_a_hook_of_a_partition_is_refused_and_one_of_a_layer_is_not(register: Any) -> None:
    first, _ = split(layers(), [1, 3])
    getattr(first[0], register.__name__)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"never be called.* pipe\.partitions\[j\]\[0\]"):
        getattr(first, register.__name__)(lambda *_: None)


def test_partitions_are_placed_on_their_devices() -> None:
    partitions = split_to(layers(), [1, 3], [CPU, META])
    assert [{p.device for p in part.parameters()} for part in partitions] == [{CPU}, {META}]


# A parameter on two devices.


def tied() -> nn.Sequential:
    module = layers(2)
    first, last = module
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    last.weight = first.weight
    return module


def test_a_parameter_shared_between_devices_lives_on_the_first_ones() -> None:
    first, second = split_to(tied(), [1, 1], [CPU, META])
    weight, bias = second[0].weight, second[0].bias
    assert weight is first[0].weight
    assert isinstance(weight, nn.Parameter) and weight.device == CPU
    assert isinstance(bias, nn.Parameter) and bias.device == META


def test_the_gradient_of_a_shared_parameter_stays_with_it() -> None:
    module = tied()
    module(torch.ones(1, 2)).sum().backward()
    _, second = split_to(module, [1, 1], [CPU, META])
    devices = [p.grad.device for p in second.parameters() if p.grad is not None]
    assert devices == [CPU, META]


def test_buffer_shared_between_devices_is_refused_by_name() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1].running_mean = module[0].running_mean
    with pytest.raises(ValueError, match=r"'0\.running_mean' on cpu is '1\.running_mean' on meta"):
        split_to(module, [1, 1], [CPU, META])


# Whether a partition could draw random numbers.


class Custom(nn.Module):
    """A module whose computation is unknown to pipert."""


@pytest.mark.parametrize("layer", [Custom(), nn.Sequential(Custom()), nn.LSTM(2, 2, 2)])
def test_unknown_layer_may_draw(layer: nn.Module) -> None:
    assert draws(nn.Sequential(nn.ReLU(), layer))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_in_training_only(training: bool) -> None:
    assert draws(nn.Sequential(nn.Dropout()).train(training)) == training


def test_running_statistics_of_two_partitions_are_refused() -> None:
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="a BatchNorm1d is used in partitions 0 and 1"):
        split_to(nn.Sequential(norm, nn.ReLU(), norm), [2, 1], [torch.device("cpu")] * 2)


# What the module has beside its layers.


def test_a_module_with_a_parameter_of_its_own_is_refused() -> None:
    module = layers(2)
    module.register_parameter("temperature", nn.Parameter(torch.ones(1)))
    module.register_buffer("steps", torch.zeros(1))
    with pytest.raises(TypeError, match=r"\['temperature', 'steps'\] of its own"):
        check_module(module)


def test_a_forward_put_on_the_module_is_refused() -> None:
    module = layers(2)
    module.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="overrides forward"):
        check_module(module)
