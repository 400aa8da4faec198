"""Tests which activations stay alive, with the garbage collector off.

Counted is data, not tensor objects: what autograd saves is another object with the same data.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert import Pipe, is_recomputing
from tests.activations import Activations
from tests.contract.ways import MODES, Way, each_way, take_step

pytestmark = pytest.mark.usefixtures("no_gc")

modes = pytest.mark.parametrize("checkpoint", MODES)


class Tanh(nn.Module):
    """A layer that saves its result for the backward, and reports it."""

    def __init__(self, seen: Activations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._seen = seen

    def forward(self, x: Tensor) -> Tensor:
        return self._seen.add(torch.tanh(x * self.weight))


class Setting:
    """A pipe of 2 partitions with 3 layers each; 4 micro-batches."""

    def __init__(self, checkpoint: str) -> None:
        self.inside = Activations()  # of a partition: all but what the last layers return
        self.between = Activations()  # partitions 0 and 1
        self.last = Activations()
        layers = [
            Tanh(self.inside),
            Tanh(self.inside),
            Tanh(self.between),
            Tanh(self.inside),
            Tanh(self.inside),
            Tanh(self.last),
        ]
        self.pipe = Pipe(
            nn.Sequential(*layers),
            balance=[3, 3],
            devices=["cpu"] * 2,
            chunks=4,
            checkpoint=checkpoint,
        )

    def left(self) -> int:
        return sum(seen.settled(0) for seen in (self.inside, self.between, self.last))


# When all is over ---------------------------------------------------------------------------------


@each_way
def test_pitfall_29_after_a_step_no_activation_is_left(way: Way) -> None:
    """The mini-batch is not left either."""
    setting = Setting(way.checkpoint)
    batch = Activations()
    with setting.pipe as pipe:
        x, target = (batch.add(torch.randn(8, 3)) for _ in range(2))
        take_step(pipe, way, x, target=target, loss_fn=mse_loss)
        del x, target
        assert setting.left() + batch.settled(0) == 0


@modes
def test_after_a_step_no_activation_is_left_though_the_output_is_kept(checkpoint: str) -> None:
    setting = Setting(checkpoint)
    with setting.pipe as pipe:
        y = pipe(torch.randn(8, 3))
        y.sum().backward()
        assert setting.left() == 0
        del y


# Between forward and backward ---------------------------------------------------------------------


def test_nothing_inside_a_checkpointed_partition_waits_for_the_backward() -> None:
    setting = Setting("always")
    with setting.pipe as pipe:
        y = pipe(torch.randn(8, 3))
        assert setting.inside.settled(0) == 0
        del y


def test_except_last_keeps_the_inside_of_the_last_micro_batch_alone() -> None:
    setting = Setting("except_last")
    with setting.pipe as pipe:
        y = pipe(torch.randn(8, 3))
        assert setting.inside.settled(4) == 4
        del y


# During a backward --------------------------------------------------------------------------------


class Watch(nn.Module):
    """In a recomputation: notes how many activations are there at its start."""

    def __init__(self, seen: Activations, counts: list[int]) -> None:
        super().__init__()
        self._seen = seen
        self._counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            self._counts.append(self._seen.now())
        return x


def test_a_recomputation_finds_the_activations_of_its_partition_s_previous_one_gone() -> None:
    counts: list[int] = []
    layers: list[nn.Module] = []
    for _ in range(2):
        seen = Activations()
        layers += [Watch(seen, counts), Tanh(seen), Tanh(seen), Tanh(Activations())]
    model = nn.Sequential(*layers)
    with Pipe(model, balance=[4, 4], devices=["cpu"] * 2, chunks=4, checkpoint="always") as pipe:
        pipe(torch.randn(8, 3, requires_grad=True)).sum().backward()
    assert counts == 8 * [0]


def test_a_retained_graph_does_not_keep_recomputed_tensors() -> None:
    setting = Setting("always")
    with setting.pipe as pipe:
        y = pipe(torch.randn(8, 3))
        y.sum().backward(retain_graph=True)
        assert setting.inside.settled(0) == 0
        del y


# During a forward ---------------------------------------------------------------------------------


def test_without_grad_a_micro_batch_is_dropped_where_it_has_passed() -> None:
    """When the last micro-batch reaches the last partition, only outputs are left of the others."""
    seen = Activations()
    counts: list[int] = []

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(seen.now())
            return x + 1

    model = nn.Sequential(Tanh(seen), Tanh(seen), Count())
    with Pipe(model, balance=[2, 1], devices=["cpu"] * 2, chunks=4) as pipe, torch.no_grad():
        pipe(torch.randn(8, 3))
    assert counts[-1] == 1  # its own input
