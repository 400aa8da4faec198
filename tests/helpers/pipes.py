"""Makes pipes on CPU, with a worker for each partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipert import Pipe

__all__ = ["pipe_of", "pipe_of_layers"]


def pipe_of(model: nn.Sequential, balance: Sequence[int] | None = None, **options: Any) -> Pipe:
    """Makes a pipe with a partition for each number of the balance, or else for each layer."""
    balance = balance or [1] * len(model)
    return Pipe(model, balance, devices=["cpu"] * len(balance), **options)


def pipe_of_layers(*layers: nn.Module, **options: Any) -> Pipe:
    """Makes a pipe with a partition for each of the layers."""
    return pipe_of(nn.Sequential(*layers), **options)
