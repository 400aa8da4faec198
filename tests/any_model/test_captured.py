"""Tests tensors that hooks capture inside layers for the model: hidden states, routers' logits."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import HOWS, How, assert_equal, results

each_how = pytest.mark.parametrize("how", HOWS, ids=[how.name for how in HOWS])

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
    model = Capturing(name).double()
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    two_rows = how._replace(rows=ROWS)  # which normalisation needs
    family = Family("capturing", lambda: Made(model, batch), ("blocks.1", "blocks.3"))
    assert_equal(*results(family.make(), family, two_rows))
