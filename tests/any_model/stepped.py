"""A model with a loss of its own, in a pipe and in a plain loop, for tests of ``step=``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import pipeline
from tests.helpers.ways import grads_of, linear

__all__ = ["a_model", "a_pipe", "batches", "own_loss", "plain_step", "same"]

CUTS = ("blocks.1", "head")


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.inner, self.dropout = linear(6, 6), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(torch.tanh(self.inner(x)))
        return y


class Model(nn.Module):
    """A model with a loss of its own."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.head = linear(4, 6), linear(6, 5)
        self.blocks = nn.ModuleList(Block(p) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        found = {"logits": logits, "norm": h.square().mean()}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits, labels.to(logits.device))
        return found


def a_model(p: float = 0.0, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model(p)


def a_pipe(model: nn.Module, **options: Any) -> Any:
    return pipeline(model, CUTS, **{"devices": ["cpu"] * 3, **options})


def batches() -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(2)
    return [
        {
            "x": torch.randn(k, 4, dtype=torch.float64, generator=draws),
            "labels": torch.randint(5, (k,), generator=draws),
        }
        for k in (3, 1, 4, 2)
    ]


def plain_step(
    model: nn.Module, step: Callable[[Any, Any], Any], given: Sequence[Any] | None = None
) -> Any:
    """Takes the step of a plain loop, with a copy; returns the mean of losses and the gradients."""
    own = copy.deepcopy(model)
    losses = [step(own, each) for each in given or batches()]
    for loss in losses:
        (loss / len(losses)).backward()
    return torch.stack(losses).mean().detach(), grads_of(own)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)


def own_loss(model: Any, batch: Any) -> Any:
    """The model's own loss and an auxiliary term."""
    y = model(**batch)
    return y["loss"] + 0.1 * y["norm"] + 1e-3 * y["logits"].logsumexp(-1).square().mean()
