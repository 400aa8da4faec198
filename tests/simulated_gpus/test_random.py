"""Random numbers of devices: seeds, states, forks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.simulated_gpus.simulation import Simulation

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda:1")


@pytest.fixture(autouse=True)
def _simulated(gpus: Simulation) -> Iterator[None]:
    yield


def draw() -> torch.Tensor:
    return torch.rand(5, device=DEVICE)


def test_a_seed_gives_the_same_numbers_again() -> None:
    torch.manual_seed(3)
    first = draw()
    torch.manual_seed(3)
    assert torch.equal(draw(), first)
    assert not torch.equal(draw(), first)


def test_each_device_draws_from_its_own_generator_and_not_from_the_cpu_s() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = draw()
    torch.manual_seed(3)
    torch.rand(5, device="cuda:0")
    torch.nn.functional.dropout(torch.ones(5, device="cuda:0"))
    assert torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_drops_the_same_elements_again() -> None:
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    y = checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())
