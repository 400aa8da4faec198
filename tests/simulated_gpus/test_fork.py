"""Children of fork: workers that load data while the parent uses the devices."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.simulated_gpus.simulation import Simulation

pytestmark = [pytest.mark.cuda, pytest.mark.slow]


def test_workers_load_what_the_parent_copies_from_pinned_memory(gpus: Simulation) -> None:
    data = torch.arange(64.0).view(16, 4)
    torch.ones(4, device="cuda:1", requires_grad=True).exp().sum().backward()  # autograd's threads
    loader = DataLoader(
        TensorDataset(data), batch_size=4, num_workers=2, pin_memory=True,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )  # fmt: skip
    copies = [x.to("cuda:1", non_blocking=True) for (x,) in loader]
    assert torch.equal(torch.cat(copies).cpu(), data)
