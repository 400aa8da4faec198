"""Tests parametrizations and pruning of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.optim import SGD

from pipert import Pipe, RecomputationError

Agree = Callable[..., None]

# What torch does not type.
mse_loss: Any = F.mse_loss
prune: Any = torch.nn.utils.prune

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


class Symmetric(nn.Module):
    """A parametrization that saves nothing for the backward."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Bounded(nn.Module):
    """A parametrization that saves its result for the backward."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)
    ).double()


Parametrize = Callable[[nn.Module], nn.Module]

PARAMETRIZATIONS: dict[str, Parametrize] = {
    "weight norm": lambda layer: weight_norm(layer),
    "orthogonal": lambda layer: orthogonal(layer),
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "bounded": lambda layer: parametrize.register_parametrization(layer, "weight", Bounded()),
}

kinds = pytest.mark.parametrize("kind", PARAMETRIZATIONS)


def parametrized(kind: str) -> nn.Sequential:
    module = perceptron()
    for k in (0, 2):
        PARAMETRIZATIONS[kind](module[k])
    return module


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(7, 6, dtype=torch.double), torch.randn(7, 3, dtype=torch.double)


def train(model: nn.Module) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for x, target in batches(3):
        optimizer.zero_grad()
        y = model(x)
        loss = mse_loss(y, target.to(y.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@modes
@kinds
def test_a_parametrized_model_trains_as_without_a_pipe(
    agree: Agree, kind: str, checkpoint: str
) -> None:
    agree(train, parametrized(kind), checkpoint=checkpoint)


# parametrize.cached() -----------------------------------------------------------------------------


class Counted(Bounded):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(weight)


def counted() -> nn.Sequential:
    module = perceptron()
    parametrize.register_parametrization(module[0], "weight", Counted())
    return module


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_cached_parametrization_is_refused_where_it_is_recomputed(
    checkpoint: str, inside: bool
) -> None:
    with Pipe(counted(), [2, 3], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        with pytest.raises(RecomputationError, match="checkpoint='never'"):
            with parametrize.cached():
                loss = pipe(next(batches(1))[0]).sum()
                if inside:
                    loss.backward()
            loss.backward()


# Pruning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pruned_layer_of_several_partitions_is_refused_in_a_step(schedule: str) -> None:
    """Its hook sets its weight, and two threads took that of the other for theirs."""
    layer = nn.Linear(8, 8)
    module = nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer))
    plain = copy.deepcopy(module)
    x = torch.randn(6, 8)
    with Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint="never") as pipe:
        for each in (layer, plain[0]):
            prune.l1_unstructured(each, "weight", 0.5)
        with pytest.raises(ValueError, match="'2.0' is used in several partitions, and torch.nn"):
            pipe.forward_backward(x, loss_fn=lambda y, _: y.mean(), schedule=schedule)
        for model in (pipe, plain):
            model(x).mean().backward()
    assert layer.weight_orig.grad is not None
    torch.testing.assert_close(layer.weight_orig.grad, plain[0].weight_orig.grad)
    module[2] = nn.Linear(8, 8)
    with Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        pipe.forward_backward(x, loss_fn=lambda y, _: y.mean(), schedule=schedule)
