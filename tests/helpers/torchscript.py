"""Lets a test use TorchScript, which torch deprecates: a test is the only reason to still call it.

torch also scripts its own formulas when forward-mode differentiation first needs them.
"""

from __future__ import annotations

import pytest

__all__ = ["uses_torchscript"]

uses_torchscript = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is:DeprecationWarning",  # up to torch 2.13
    "ignore:`torch.jit.script` is:FutureWarning",
)
