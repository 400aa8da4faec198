"""When partitions on several GPUs are recomputed in the backward of a call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.any_model.piped import CHUNKS

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]


class Passing(nn.Module):
    """The next partition uses what all layers of one have returned, and the last one an input.

    Args:
        pairs: of modules in a layer: where they are many, each layer is one node of the graph.
    """

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * pairs) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = x = x * 1
        for k in range(0, 6, 2):
            x = self.layers[k](x)
            x = self.layers[k + 1](x) + x
        return x + first


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("pairs", [1, 20])
def test_each_is_recomputed_once_for_each_backward(pairs: int, backwards: int) -> None:
    model, x = Passing(pairs).double(), torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    plain, own = copy.deepcopy(model), x.detach().clone().requires_grad_()
    options: dict[str, Any] = {"devices": ["cuda:0", "cuda:1", "cuda:0"], "chunks": CHUNKS}
    with pipert.pipeline(model, ["layers.2", "layers.5"], checkpoint="always", **options) as pipe:
        loss: Any = pipe(x).square().sum()
        expected: Any = plain(own).square().sum()
        for k in range(backwards):
            loss.backward(retain_graph=k + 1 < backwards)
            expected.backward(retain_graph=k + 1 < backwards)
        assert pipe.statistics().recomputations == 3 * CHUNKS * backwards
    for one, other in zip((x, *model.parameters()), (own, *plain.parameters()), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad)
