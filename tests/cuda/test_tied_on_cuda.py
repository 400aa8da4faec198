"""Tests tied weights between real devices, such as a GPU and the CPU. Additional proof."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe

pytestmark = pytest.mark.cuda

TOKENS = torch.arange(24).reshape(8, 3) % 7


class Head(nn.Module):
    """A linear layer without a weight of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def language_model() -> nn.Sequential:
    torch.manual_seed(1)
    embedding = nn.Embedding(7, 4)
    return nn.Sequential(embedding, nn.Linear(4, 4), nn.GELU(), Head(embedding.weight))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(
    "devices",
    [
        ["cuda:0", "cpu"],
        ["cpu", "cuda:0"],
        pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.multi_gpu),
    ],
    ids=",".join,
)
def test_training_gives_the_plain_modules_weights(devices: list[str], checkpoint: str) -> None:
    plain = language_model()
    module = copy.deepcopy(plain)
    with Pipe(module, [2, 2], devices=devices, chunks=4, checkpoint=checkpoint) as pipe:
        assert {p.device for p in pipe[0].parameters()} == {pipe.devices[0]}
        for model in (plain, pipe):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                y = model(TOKENS)
                loss = F.cross_entropy(y.flatten(0, 1), TOKENS.flatten().to(y.device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        theirs = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.cpu(), theirs[name])
