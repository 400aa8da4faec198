"""Small models with code of their own between their layers, for pipelines over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def layer(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Unet(nn.Module):
    """Skips in a list, a time embedding, an own parameter, the middle registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.offset: Tensor
        self.register_buffer("offset", torch.linspace(0, 1, 8))
        self.time = nn.Linear(8, 8)
        self.downs = nn.ModuleList([layer(8) for _ in range(3)])
        self.ups = nn.ModuleList([layer(16) for _ in range(3)])
        self.out = nn.Linear(8, 4)
        self.middle = layer(8)

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Any]:
        table = torch.exp(torch.arange(4, device=x.device) * -0.5)
        angles = t[:, None] * table
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        h, skips = x * self.scale + self.offset, []
        for down in self.downs:
            h = down(h) + embedded
            skips.append(h)
        h = self.middle(h)
        for up in self.ups:
            h = up(torch.cat([h, skips.pop()], 1))[:, :8]
        return {"y": self.out(h) * self.scale, "mean": h.mean()}


class Tied(nn.Module):
    """A tiny language model: a mask, tied weights, an own head, labels; a loss in its output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([layer(8) for _ in range(4)])
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        mask = (ids != 0)[..., None]
        h = self.dropout(self.embed(ids))
        for block in self.blocks:
            h = h + block(h) * mask
        logits = self.head(self.norm(h))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Head(nn.Module):
    """Has an embedding's weight, which may be on another rank."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def unet_batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 8, generator=generator), "t": torch.arange(rows).float()}


def tied_batch(rows: int, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 16, (rows, length), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def loss_of_unet(y: Any, _: Any) -> Tensor:
    loss: Tensor = y["y"].square().mean()
    return loss


def loss_in_output(y: Any, _: Any) -> Tensor:
    loss: Tensor = y["loss"]
    return loss


MODELS = {
    "unet": (Unet, unet_batch, ["downs.1", "middle", "ups.1"], loss_of_unet),
    "tied": (Tied, tied_batch, ["blocks.1", "blocks.2", "blocks.3"], loss_in_output),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name][0]()
    return model
