"""Applies pipert's own autograd functions without the overhead of ``torch.func`` support.

``Function.apply`` first searches its arguments, in Python, for wrappers of ``torch.func``. A pipe
refuses to run inside a transform, so pipert's functions never get any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__: list[str] = []


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the ``apply`` that ``function`` inherits from the C++ base class."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
