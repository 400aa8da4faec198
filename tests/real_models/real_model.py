"""Describes models of libraries, built as small as their code allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.family import Made, made

__all__ = ["ROWS", "RealModel", "draw", "images", "library", "steps"]

ROWS = 7
"""The rows of a batch, of which a pipe takes some."""


@dataclass(frozen=True, eq=False)
class RealModel:
    """A small model of a library, and a batch for it."""

    name: str
    make: Callable[[], nn.Module]
    """Makes the model, whose parameters are drawn; downloads nothing."""
    batch: Callable[[], dict[str, Any]]
    """Draws the keyword arguments of one call."""
    recomputed: bool = True
    """Whether it may be recomputed; not if layers change their argument in place."""
    returns_loss: bool = False
    """Whether a call returns a loss alone."""

    def __repr__(self) -> str:
        return self.name

    def made(self) -> Made:
        """Makes the model and its batch, the same each time."""
        torch.default_generator.manual_seed(0)
        return made(self.make(), self.batch())


def library(name: str) -> Any:
    """Imports a library or a module of it; skips the test if it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations that the import meets
        return pytest.importorskip(name, reason=f"the model is one of {name.partition('.')[0]}")


def draw(*shape: int) -> Tensor:
    """Draws a tensor with a row of this shape for each row of the batch."""
    return torch.randn(ROWS, *shape)


def images(name: str, size: int = 16) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: draw(3, size, size)}


def steps() -> Tensor:
    """Draws a time for each row."""
    return torch.randint(1000, (ROWS,))
