"""Tests tensors that hooks capture inside layers for the model: hidden states, routers' logits."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.any_model.family import ROWS
from tests.any_model.piped import How, compare, each_how

captured: ContextVar[list[Tensor] | None] = ContextVar("captured", default=None)


class Block(nn.Module):
    """A block that saves enough for its backward to be one node when it is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4)
        self.layers = nn.Sequential(
            *[layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.Tanh())]
        )

    def forward(self, x: Tensor) -> Any:
        return x + self.layers(self.first(self.norm(x)))


class Capturing(nn.Module):
    """A model that returns the outputs captured by hooks, as ``transformers`` does.

    Args:
        name: of the module in each block whose output they keep; the empty string for the block.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.get_submodule(name).register_forward_hook(_capture)

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        token = captured.set(kept)
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            captured.reset(token)
        return {"last": x, "captured": torch.stack(kept, 1)}


def _capture(module: nn.Module, args: Any, output: Tensor) -> None:
    kept = captured.get()
    if kept is not None:
        kept.append(output)


@each_how
@pytest.mark.parametrize("name", ["", "first", "layers.5"])
def test_gradients_flow_through_captured_tensors_as_in_the_plain_model(name: str, how: How) -> None:
    two_rows = how._replace(rows=ROWS)  # which normalisation needs
    compare(Capturing(name), ("blocks.1", "blocks.3"), two_rows)


class Keeping(nn.Module):
    """A model that computes a weight in the first micro-batch, and keeps it with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.kept: Tensor | None = None
        self.first, self.second = Using(self), Using(self)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


class Using(nn.Module):
    def __init__(self, owner: Keeping) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.owner = [owner]

    def forward(self, x: Tensor) -> Any:
        (owner,) = self.owner
        if owner.kept is None:
            owner.kept = owner.weight + owner.weight  # which saves nothing
        return self.linear(x) * owner.kept


def test_a_tensor_with_a_graph_that_the_model_keeps_for_a_later_partition_is_refused() -> None:
    model, x = Keeping(), torch.randn(8, 4)
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=4) as pipe:
        with pytest.raises(RuntimeError, match="a step of a pipe does not see it"):
            pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean())
