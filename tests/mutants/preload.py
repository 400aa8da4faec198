"""What every trial begins with, done once: torch with simulated GPUs, and pytest.

The process that trials are forked from imports this. No autograd has run in it, nor is pipert
imported: a child can still do both as if it had been started for that.
"""

from __future__ import annotations

from tests import simulated_gpus

simulated_gpus.start()

import pytest  # noqa: E402, F401  isort: skip
import torch  # noqa: E402, F401  isort: skip
