"""A model whose calls go through its pipe, for tests of that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipert import pipeline
from tests.helpers.ways import linear

__all__ = ["Encoder", "Model", "a_model", "a_pipe", "rows", "runs"]

CUTS = ("encoder.blocks.1", "head")


class Encoder(nn.Module):
    """A container whose layers are in two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0, *, as_number: bool = False) -> Tensor:
        y: Tensor = self.head(self.encoder(x)) * scale
        return y.square().mean() if as_number else y


def a_model() -> Model:
    torch.manual_seed(1)
    return Model()


def a_pipe(model: nn.Module, prefix: str = "", **options: Any) -> Any:
    options = {"devices": ["cpu"] * 3, "chunks": 2, **options}
    return pipeline(model, [prefix + cut for cut in CUTS], **options)


def rows(number: int = 6, **options: Any) -> Tensor:
    return torch.randn(number, 4, dtype=torch.float64, **options)


def runs(pipe: Any) -> int:
    """Returns how many calls have gone through the pipe since this was asked last."""
    number: int = pipe.statistics().runs
    since: int = number - pipe.__dict__.get("seen", 0)
    pipe.__dict__["seen"] = number
    return since
