"""Makes the models to check: small, but with everything that makes a pipeline difficult.

They are a network of convolutions; a GPT whose head shares the embedding's weight across
partitions; a U-Net whose skips cross partitions, with in-place layers; and a chain of equal layers
for measurements.

All their functions are smooth: where ReLU or max-pooling chooses between values that differ
by rounding, a gradient jumps. All have deterministic kernels on CUDA, so there is no max-pooling,
no interpolation and no fused attention. None has BatchNorm, which depends on the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash

__all__: list[str] = []

Loss = Callable[[Tensor, Tensor], Tensor]

ROWS = 10  # four micro-batches of 3, 3, 2 and 2
CLASSES = 8
TOKENS = 12


@dataclass(frozen=True)
class Model:
    """A model with its input, target and loss, on the CPU."""

    name: str
    layers: nn.Sequential
    x: Tensor
    target: Tensor
    loss_fn: Loss
    chunks: int = 4


def small_models(n: int, dtype: torch.dtype) -> list[Model]:
    """Makes the three models for ``n`` partitions, seeded, on the CPU, without dropout."""
    torch.manual_seed(0)
    images = torch.randn(ROWS, 3, 8, 8, dtype=dtype)
    classes, depths = torch.randint(CLASSES, (ROWS,)), torch.randn(ROWS, 1, 8, 8, dtype=dtype)
    return [
        Model("convolutions", convolutions(n).to(dtype), images, classes, F.cross_entropy),
        language_model(gpt(n, 0.0).to(dtype)),
        Model("U-Net", unet().to(dtype), images, depths, F.mse_loss),
    ]


def language_model(layers: nn.Sequential) -> Model:
    """Makes a model of the GPT ``layers`` and random tokens."""
    tokens = torch.randint(CLASSES, (ROWS, TOKENS + 1))
    return Model("GPT", layers, tokens[:, :-1], tokens[:, 1:], next_token_loss)


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the cross entropy of logits ``[rows, tokens, classes]``."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# Convolutions -------------------------------------------------------------------------------------


def convolutions(n: int) -> nn.Sequential:
    """Maps ``[rows, 3, height, width]`` to ``[rows, CLASSES]``."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(max(2, n // 2)):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


# GPT ----------------------------------------------------------------------------------------------


def gpt(n: int, dropout: float, tied: bool = True, width: int = 16) -> nn.Sequential:
    """Maps ``[rows, TOKENS]`` to ``[rows, TOKENS, CLASSES]``; a tied head shares the embedding."""
    first, head = _Embedding(width), nn.Linear(width, CLASSES, bias=False)
    if tied:
        head.weight = first.tokens.weight
    blocks = [_Block(width, dropout) for _ in range(max(2, n - 2))]
    return nn.Sequential(first, *blocks, nn.LayerNorm(width), head)


class _Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, width)
        self.positions = nn.Parameter(0.1 * torch.randn(TOKENS, width))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions
        return embedded


class _Block(nn.Module):
    """Causal attention and a perceptron, as in GPT-2."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, num_heads=2, batch_first=True)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y, rows = self.norms[0](x), x.shape[1]
        future = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        # By default attention also returns its weights, and so is not fused.
        x = x + self.dropout(self.attention(y, y, y, attn_mask=future)[0])
        z: Tensor = x + self.dropout(self.perceptron(self.norms[1](x)))
        return z


# U-Net --------------------------------------------------------------------------------------------


def unet() -> nn.Sequential:
    """Maps ``[rows, 3, height, width]`` to ``[rows, 1, height, width]``."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        *_cell(3, 4), _Stash().isolate(outer), nn.Conv2d(4, 4, 2, stride=2),
        *_cell(4, 8), _Stash().isolate(inner), nn.Conv2d(8, 8, 2, stride=2),
        *_cell(8, 8),
        nn.Conv2d(8, 32, 1), nn.PixelShuffle(2), _Concatenate().isolate(inner), *_cell(16, 8),
        nn.Conv2d(8, 16, 1), nn.PixelShuffle(2), _Concatenate().isolate(outer), *_cell(8, 4),
        nn.Conv2d(4, 1, 1),
    )  # fmt: skip


def _cell(inputs: int, outputs: int) -> Iterator[nn.Module]:
    yield nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    yield nn.GroupNorm(2, outputs)
    yield nn.ELU(inplace=True)


@skippable(stash=["skip"])
class _Stash(Skippable):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class _Concatenate(Skippable):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return torch.cat([skip, x], dim=1)


# The chain ----------------------------------------------------------------------------------------


def chain(layers: int, width: int, dropout: float = 0.0) -> nn.Sequential:
    """Makes equal layers that map ``[rows, width]`` to the same shape.

    Without dropout each layer saves one tensor of its input's size for the backward.
    """
    torch.manual_seed(0)
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.Tanh(), *drop) for _ in range(layers)]
    )
