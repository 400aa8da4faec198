"""Tests that hooks of weights on two GPUs, whose threads are the engine's, see the whole once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.helpers.ways import Way, each_way, grads_of, linear, same, take_step

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]


def tied() -> nn.Sequential:
    torch.manual_seed(4)
    module = nn.Sequential(*[linear(3, 3) for _ in range(4)])
    module[3].weight = module[0].weight
    return module


@each_way
@pytest.mark.parametrize("kind", ["layers", "any model"])
def test_a_hook_of_a_weight_is_called_once_with_the_whole(kind: str, way: Way) -> None:
    module, plain, seen = tied(), tied(), list[Tensor]()
    options: Any = {"devices": ["cuda:0", "cuda:1"], "chunks": 3, "checkpoint": way.checkpoint}
    x = torch.randn(7, 3, dtype=torch.float64)

    def note(gradient: Tensor) -> Tensor:
        seen.append(gradient.cpu())
        return gradient * 2

    for one in (module, plain):
        for parameter in one.parameters():
            hooked: Any = parameter
            hooked.register_hook(note)
    pipe: Any = (
        pipert.Pipe(module, [2, 2], **options) if kind == "layers"
        else pipert.pipeline(module, ["2"], **options)
    )  # fmt: skip
    with pipe:
        take_step(pipe, way, x, loss_fn=lambda y, _: y.square().mean())
    assert len(seen) == 7  # parameters
    torch.autograd.backward(plain(x).square().mean())
    found = {name: None if dw is None else dw.cpu() for name, dw in grads_of(module).items()}
    same(found, grads_of(plain))
