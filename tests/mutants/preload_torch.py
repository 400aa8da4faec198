"""What every trial begins with, done once: torch and pytest.

The process that trials are forked from imports this. No autograd has run in it, nor is pipert
imported: a child can still do both as if it had been started for that.
"""

from __future__ import annotations

import fractions  # noqa: F401
import statistics  # noqa: F401

import pytest  # noqa: F401
import sympy  # type: ignore[import-untyped]  # noqa: F401  torch imports it late
import torch  # noqa: F401
import torch._dynamo  # noqa: F401  so does each optimizer
import torch.fx.experimental.symbolic_shapes  # noqa: F401

__all__: list[str] = []
