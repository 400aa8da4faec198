"""Makes pipes of both kinds, and micro-batches for ``pipe.map``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, pipeline
from tests.contract.ways import linear

__all__ = ["MANY", "N", "Source", "a_pipe", "batches", "kinds", "layers"]

N = 3
MANY = 20

kinds = pytest.mark.parametrize("kind", ["Pipe", "pipeline"])


def a_pipe(kind: str, *layers: nn.Module, **options: Any) -> Any:
    model = nn.Sequential(*layers)
    options = {"devices": ["cpu"] * len(layers), **options}
    if kind == "Pipe":
        return Pipe(model, [1] * len(layers), **options)
    return pipeline(model, [str(j) for j in range(1, len(layers))], **options)


def layers(middle: nn.Module | None = None) -> list[nn.Module]:
    return [linear(3, 4), middle or nn.Tanh(), linear(4, 2)]


def batches(number: int = MANY) -> list[Tensor]:
    return [torch.randn(1 + k % 4, 3, dtype=torch.float64) for k in range(number)]


class Source:
    """Counts how many micro-batches have been read."""

    def __init__(self, xs: list[Any], failing_at: int | None = None) -> None:
        self.xs = xs
        self.failing_at = failing_at
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for k, x in enumerate(self.xs):
            if k == self.failing_at:
                raise OSError("no more data")
            self.read += 1
            yield x
