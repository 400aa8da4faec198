"""Pipes on CPU, a worker for each partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipert import Pipe

__all__ = ["pipe_of", "pipe_of_layers"]


def pipe_of(model: nn.Sequential, balance: Sequence[int] | None = None, **options: Any) -> Pipe:
    """A pipe with a partition for each number of the balance; without one, for each layer."""
    balance = balance or [1] * len(model)
    return Pipe(model, balance, devices=["cpu"] * len(balance), **options)


def pipe_of_layers(*layers: nn.Module, **options: Any) -> Pipe:
    """The same of layers one by one."""
    return pipe_of(nn.Sequential(*layers), **options)
