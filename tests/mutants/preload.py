"""Preloads every trial: starts simulated GPUs, then imports torch and pytest, once for all.

The process from which trials are forked imports this. It has not run autograd and not imported
pipert, so a child can do both like a fresh process.
"""

from __future__ import annotations

import fractions  # noqa: F401
import statistics  # noqa: F401

from tests import simulated_gpus

simulated_gpus.start()

import pytest  # noqa: E402, F401
import sympy  # type: ignore[import-untyped]  # noqa: E402, F401  torch imports it late
import torch  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  each optimizer imports it late
import torch.fx.experimental.symbolic_shapes  # noqa: E402, F401

__all__: list[str] = []
