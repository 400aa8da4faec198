"""Tests that a weight's gradients are summed in one order, whatever the pipe did before.

In float32, where another order is another sum. Numbers of nodes, by which autograd orders what is
ready, count up in each worker for itself, so each repeat finds them further apart.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.caller_threads import Caller
from tests.helpers.ways import CALL, MODES, Way, each_way, piped, take_step

TOKENS = torch.arange(42).reshape(14, 3) % 8


class Head(nn.Module):
    """A linear layer without a weight of its own."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def tied() -> nn.Sequential:
    """Makes three very different partitions that share a weight, which the last uses twice."""
    torch.manual_seed(1)
    embedding = nn.Embedding(8, 8)
    many = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
    weight = embedding.weight
    return nn.Sequential(embedding, nn.Tanh(), Head(weight), Head(weight), *many, Head(weight))


BALANCE = [1, 2, 14]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def bits(module: nn.Module) -> list[Any]:
    found = [p.grad for p in module.parameters() if p.grad is not None]
    assert found
    return [grad.flatten().tolist() for grad in found]


@each_way
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_weight_of_several_partitions_gets_the_same_bits_each_time(
    way: Way, chunks: int
) -> None:
    found = []
    with piped(tied(), BALANCE, way, chunks) as pipe:
        for _ in range(8):
            pipe.zero_grad()
            take_step(pipe, way, TOKENS, loss_fn=cross_entropy, target=TOKENS)
            found.append(bits(pipe))
            pipe.chunks = 7
            pipe(TOKENS)  # counts up, and goes back nowhere
            pipe.chunks = chunks
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize(("chunks", "ahead"), [(1, 100), (2, 100), (4, 100), (14, 0)])
@pytest.mark.parametrize("checkpoint", MODES)
def test_so_does_one_that_the_caller_uses_as_well(
    checkpoint: str, chunks: int, ahead: int
) -> None:
    def steps() -> list[Any]:
        module, found = tied(), []
        weight: Any = module[0].weight
        with piped(module, BALANCE, Way(CALL, checkpoint), chunks) as pipe:
            for _ in range(ahead):
                weight.square()  # until the workers overtake the caller
            for _ in range(8):
                pipe.zero_grad()
                penalty = weight.square().sum() + weight.abs().sum()
                loss: Any = cross_entropy(pipe(TOKENS), TOKENS) + 1e-3 * penalty
                loss.backward()
                found.append(bits(pipe))
        return found

    found = Caller(steps).result()  # a new thread, which has made no nodes
    assert all(one == found[0] for one in found)


@each_way
def test_one_micro_batch_has_the_bits_of_the_plain_module(way: Way) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5))
    module, x = copy.deepcopy(plain), torch.randn(6, 5)
    loss: Any = F.mse_loss(plain(x), x)
    loss.backward()
    with piped(module, [1, 2, 1], way, chunks=1) as pipe:
        assert take_step(pipe, way, x, loss_fn=F.mse_loss, target=x) == loss
    assert bits(module) == bits(plain)
