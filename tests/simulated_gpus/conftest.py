"""Provides the simulation for its own tests, which are skipped if GPUs are real or missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests import simulated_gpus
from tests.simulated_gpus.simulation import Simulation


@pytest.fixture
def gpus() -> Iterator[Simulation]:
    """Provides the simulated devices, with the rates that they have when a process starts."""
    simulation = simulated_gpus.running()
    if simulation is None:
        pytest.skip("is about the simulation: python -m pytest --simulated-gpus")
    yield simulation
    simulation.rates(launch_us=5, memory_gbps=1000, link_gbps=25, tflops=20)


@pytest.fixture
def kinds(gpus: Simulation) -> Callable[[], list[str]]:
    """Returns a function that takes the reports, before they fail a test, and lists their kinds."""

    def take() -> list[str]:
        found = [report.kind for report in gpus.reports()]
        gpus.clear()
        return found

    return take
