"""Eight simulated GPUs: torch's CUDA devices, with every missing wait reported.

::

    from tests import simulated_gpus
    gpus = simulated_gpus.start()          # before ``import torch``
    import torch                           # torch.cuda.device_count() == 8
    ...
    for report in gpus.reports():          # races, and memory reused too early
        print(report)

README.md in this folder says what is modelled, and what cannot be seen. Run an
unmodified program by ``python -m tests.simulated_gpus program.py``, and the tests by
``python -m pytest --simulated-gpus``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated_gpus.simulation import Simulation

__all__ = ["load", "pretend_loaded", "running", "start"]

_running: list[Simulation] = []


def start(devices: int = 8) -> Simulation:
    """Make torch believe in ``devices`` GPUs, for the rest of the process.

    Builds the library on first use, which takes half a minute. A second call returns the first's.

    Raises:
        RuntimeError: if torch has been imported before, or there is no g++.
    """
    if not _running:
        load(devices)
        pretend_loaded()
    return _running[0]


def load(devices: int = 8) -> None:
    """The first half of ``start``: load the library, which torch asks for devices when it loads.

    Raises:
        RuntimeError: as ``start``.
    """
    if "torch" in sys.modules:
        raise RuntimeError("simulated_gpus.start() must come before `import torch`")
    from tests.simulated_gpus.build import library
    from tests.simulated_gpus.simulation import Simulation

    _running.append(Simulation(library(), devices))


def pretend_loaded() -> None:
    """The second half: import torch, and give it what a build without CUDA has no functions for."""
    from tests.simulated_gpus.pretend import pretend

    pretend(_running[0])


def running() -> Simulation | None:
    """The simulation of this process, if there is one."""
    return _running[0] if _running else None
