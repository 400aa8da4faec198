"""Makes the models to check: one with everything that makes a pipeline difficult, and a chain.

The first is a small transformer: its head shares the embedding's weight, and the embedding is added
again at the end, both across all partitions; one layer works in place. All its functions are
smooth: where ReLU chooses between values that differ by rounding, a gradient jumps. There is no
BatchNorm, which depends on the micro-batch. The chain of equal layers is for measurements.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipert.skip import Skippable, pop, skippable, stash

__all__: list[str] = []

ROWS = 10  # four micro-batches of 3, 3, 2 and 2
CLASSES = 8
TOKENS = 12


@dataclass(frozen=True)
class Case:
    """A model with its input, and the target of its squared error, on the CPU."""

    name: str
    layers: nn.Sequential
    x: Tensor
    target: Tensor
    chunks: int = 4


def transformer(n: int, dtype: torch.dtype, dropout: float = 0.0, tied: bool = True) -> Case:
    """Makes the first model for ``n`` partitions, seeded; its weights are shared if ``tied``."""
    torch.manual_seed(0)
    width = 16
    embedding, head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES, bias=False)
    if tied:
        head.weight = embedding.weight
    blocks = [
        nn.TransformerEncoderLayer(width, 2, 4 * width, dropout, "gelu", batch_first=True)
        for _ in range(n)
    ]
    layers = nn.Sequential(embedding, _Stash(), nn.ELU(inplace=True), *blocks, _Add(), head)
    tokens = torch.randint(CLASSES, (ROWS, TOKENS))
    target = torch.randn(ROWS, TOKENS, CLASSES, dtype=dtype)
    return Case("transformer", layers.to(dtype), tokens, target)


@skippable(stash=["embedded"])
class _Stash(Skippable):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("embedded", x)
        return x.clone()


@skippable(pop=["embedded"])
class _Add(Skippable):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        embedded = yield pop("embedded")
        return x + embedded


def chain(n: int, m: int, layers: int, width: int, rows: int, dropout: float = 0.0) -> Case:
    """Makes ``n`` partitions of ``layers`` equal layers, and ``m`` micro-batches of ``rows``.

    Without dropout each layer saves one tensor of its input's size for the backward.
    """
    torch.manual_seed(0)
    drop = [nn.Dropout(dropout)] if dropout else []
    each = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), *drop) for _ in range(n * layers)]
    x, target = torch.randn(m * rows, width), torch.randn(m * rows, width)
    name = f"{n} x {layers} layers of width {width}, {m} micro-batches of {rows} rows"
    return Case(name, nn.Sequential(*each), x, target, m)
