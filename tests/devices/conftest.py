"""Provides the simulated devices to tests that read or exhaust memory as no real GPU allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import simulated_gpus
from tests.simulated_gpus.simulation import Simulation


@pytest.fixture
def gpus() -> Iterator[Simulation]:
    """Provides the simulated devices; afterwards no allocation fails and no limit is set."""
    simulation = simulated_gpus.running()
    if simulation is None:
        pytest.skip("counts bytes and lets allocations fail, on simulated GPUs alone")
    yield simulation
    for device in range(simulation.devices):
        simulation.fail_allocation(device, 0)
        whole = torch.cuda.get_device_properties(device).total_memory
        simulation.limit_memory(device, whole)
