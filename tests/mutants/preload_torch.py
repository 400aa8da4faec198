"""Preloads torch and pytest, once for all trials.

The process from which trials are forked imports this. It has not run autograd and not imported
pipert, so a child can do both like a fresh process.
"""

from __future__ import annotations

import fractions  # noqa: F401
import statistics  # noqa: F401

import pytest  # noqa: F401
import sympy  # type: ignore[import-untyped]  # noqa: F401  torch imports it late
import torch  # noqa: F401
import torch._dynamo  # noqa: F401  each optimizer imports it late
import torch.fx.experimental.symbolic_shapes  # noqa: F401

__all__: list[str] = []
