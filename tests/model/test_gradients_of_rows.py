"""Tests hooks that compute the gradient of each row, as those of Opacus: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import pipeline
from pipert.pipes.base import PipeBase
from tests.helpers.pipes import pipe_of_layers

mse = nn.functional.mse_loss


class Opacus:
    """Computes the gradient of each row of a layer's weight as Opacus does."""

    weight: Any

    def __init__(self, layer: nn.Linear) -> None:
        self._inputs = list[Tensor]()
        self.weight = layer.weight
        self.weight.grad_sample = None
        self._handles = [
            layer.register_forward_hook(self._push), layer.register_full_backward_hook(self._pop)
        ]  # fmt: skip

    def _push(self, _: nn.Module, args: Any, __: object) -> None:
        if torch.is_grad_enabled():
            self._inputs.append(args[0].detach())

    def _pop(self, _: nn.Module, __: object, dys: Any) -> None:
        found = torch.einsum("no,ni->noi", dys[0], self._inputs.pop())
        self.weight.grad_sample = found * len(found)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        del self.weight.grad_sample


def call(pipe: PipeBase, x: Tensor) -> None:
    torch.autograd.backward(mse(pipe(x), x))


def step(pipe: PipeBase, x: Tensor) -> None:
    pipe.forward_backward(x, target=x, loss_fn=mse)


@pytest.mark.parametrize("train", [call, step])
@pytest.mark.parametrize("kind", ["Pipe", "any model"])
def test_gradients_of_rows_are_the_plain_model_s_or_refused(
    kind: str, train: Callable[[PipeBase, Tensor], None]
) -> None:
    layers, x = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(6, 4)
    opacus = Opacus(layers[1])
    torch.autograd.backward(mse(nn.Sequential(*layers)(x), x))
    expected = opacus.weight.grad_sample
    options: Any = {"chunks": 3, "checkpoint": "never"}
    with (
        pipe_of_layers(*layers, **options) if kind == "Pipe"
        else pipeline(nn.Sequential(*layers), ["1"], devices=["cpu"] * 2, **options)
    ) as pipe:  # fmt: skip
        with pytest.raises(RuntimeError, match="weights have a grad_sample.*chunks=1"):
            train(pipe, x)
        with torch.no_grad():
            assert pipe(x).shape == (6, 4)
        pipe.chunks = 1
        train(pipe, x)
        torch.testing.assert_close(opacus.weight.grad_sample, expected)
        opacus.remove()
        pipe.chunks = 3
        train(pipe, x)
