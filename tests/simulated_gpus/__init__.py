"""Simulates eight GPUs as torch's CUDA devices, and reports every missing wait.

::

    from tests import simulated_gpus
    gpus = simulated_gpus.start()          # before ``import torch``
    import torch                           # torch.cuda.device_count() == 8
    ...
    for report in gpus.reports():          # races, and memory reused too early
        print(report)

README.md in this folder says what is modelled, and what cannot be seen. ``python -m
tests.simulated_gpus program.py`` runs an unmodified program, and ``python -m pytest
--simulated-gpus`` the tests.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated_gpus.simulation import Simulation

__all__ = ["load", "pretend_loaded", "running", "start"]

_running: list[Simulation] = []


def start(devices: int = 8) -> Simulation:
    """Gives torch ``devices`` simulated GPUs, for the rest of the process.

    The first use builds the library, which takes half a minute. Later calls return the first
    call's simulation.

    Raises:
        RuntimeError: if torch has been imported before, or there is no g++.
    """
    if not _running:
        load(devices)
        pretend_loaded()
    return _running[0]


def load(devices: int = 8) -> None:
    """Does the first half of ``start``: loads the library, before torch looks for devices.

    Raises:
        RuntimeError: as ``start``.
    """
    if "torch" in sys.modules:
        raise RuntimeError("simulated_gpus.start() must come before `import torch`")
    from tests.simulated_gpus import without_cuda
    from tests.simulated_gpus.build import library
    from tests.simulated_gpus.simulation import Simulation

    without_cuda.forget_names()
    _running.append(Simulation(library(), devices))


def pretend_loaded() -> None:
    """Does the second half: imports torch, and adds the functions that its CPU build lacks."""
    from tests.simulated_gpus.pretend import pretend

    pretend(_running[0])


def running() -> Simulation | None:
    """Returns the simulation of this process, if there is one."""
    return _running[0] if _running else None
