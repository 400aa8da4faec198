"""Tests parametrizations and pruning of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.optim import SGD

from pipert import Pipe, RecomputationError

Agree = Callable[..., None]

# What torch does not type.
mse_loss: Any = F.mse_loss

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
