"""Provides the models of the memory tests, with losses: a small U-Net, as the paper's, and GPT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from models import gpt
from models.unet import unet
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SUBJECTS", "Subject", "even", "split"]


@dataclass(frozen=True)
class Subject:
    """A model, one micro-batch for it, and its loss."""

    name: str
    model: nn.Sequential
    x: Tensor
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    def batch(self, m: int, n: int) -> tuple[Tensor, Tensor]:
        """Returns ``m`` micro-batches on the first of ``n`` devices, the targets on the last."""
        return torch.cat([self.x] * m).to("cuda:0"), torch.cat([self.target] * m).to(f"cuda:{n-1}")


def even(layers: int, n: int) -> list[int]:
    """Returns the number of layers of each of ``n`` partitions, as equal as possible."""
    return [layers // n + (j < layers % n) for j in range(n)]


def split(model: nn.Sequential, balance: Sequence[int]) -> list[nn.Sequential]:
    """Splits a model into partitions."""
    layers = iter(model)
    return [nn.Sequential(*[next(layers) for _ in range(count)]) for count in balance]


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _unet(blocks: int, channels: int) -> Subject:
    model, x = unet(blocks, channels), torch.rand(1, 3, 64, 64)
    name = f"U-Net ({blocks}, {channels})"
    return Subject(name, model, x, torch.rand(1, 1, 64, 64), functional.mse_loss)


def _gpt(layers: int, width: int) -> Subject:
    model = gpt.build_model(gpt.ModelConfig(layers=layers, width=width, context=32))
    tokens = torch.randint(256, (2, 32))
    return Subject(f"GPT ({layers}, {width})", model, tokens, tokens, _cross_entropy)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "unet": lambda: _unet(1, 4),
    "gpt": lambda: _gpt(6, 32),
}
