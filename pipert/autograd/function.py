"""Applying a ``Function`` of ours without what ``torch.func`` needs.

``Function.apply`` looks for wrappers of ``torch.func`` among its arguments, in Python, before it
does what was asked. A pipe refuses to run inside of a transform, so that ours never get any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__: list[str] = []


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies ``function``: the base class's ``apply``, which is C++."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
