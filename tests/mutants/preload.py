"""What every trial begins with, done once: torch with simulated GPUs, and pytest.

The process that trials are forked from imports this. No autograd has run in it, nor is pipert
imported: a child can still do both as if it had been started for that.
"""

from __future__ import annotations

from tests import simulated_gpus

simulated_gpus.start()

import fractions  # noqa: E402, F401
import statistics  # noqa: E402, F401

import pytest  # noqa: E402, F401
import sympy  # type: ignore[import-untyped]  # noqa: E402, F401  torch imports it late
import torch  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  so does each optimizer
import torch.fx.experimental.symbolic_shapes  # noqa: E402, F401
