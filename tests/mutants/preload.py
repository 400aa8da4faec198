"""Imports once what every trial needs: torch with simulated GPUs, and pytest.

The process that trials are forked from imports this. It has neither run autograd nor imported
pipert, so a child can do both as if freshly started.
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
