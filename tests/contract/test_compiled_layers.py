"""Tests compiled layers in a step; each is compiled before it is wrapped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import pipert
from pipert import Pipe, TransformError
from tests.helpers.ways import Way, batch, grads_of, linear, mean, same, ways

pytestmark = [
    pytest.mark.slow,  # the first compilation imports for seconds
    pytest.mark.usefixtures("forget_compiled"),
    # Of dynamo: about itself, and of NumPy, which need not be there.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


class Block(nn.Module):
    """A layer that users would compile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(3, 3), linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        return y


def step(module: nn.Sequential, way: Way, x: Tensor, **options: Any) -> Tensor:
    balance = [2, len(module) - 2]
    with Pipe(module, balance, devices=["cpu"] * 2, chunks=3, checkpoint=way.checkpoint) as pipe:
        loss: Tensor = pipe.forward_backward(
            x, schedule=way.schedule, **{"loss_fn": mean, **options}
        )
    return loss


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_of_compiled_layers_is_that_of_the_plain_module(backend: str, way: Way) -> None:
    module, x = nn.Sequential(*[Block() for _ in range(4)]), batch(7, requires_grad=True)
    plain, own = copy.deepcopy(module), x.detach().clone().requires_grad_()
    for layer in module:
        layer.compile(backend=backend)
    loss = step(module, way, x)
    expected = mean(plain(own), None)
    expected.backward()
    same(loss, expected.detach())
    same(grads_of(module), grads_of(plain))
    same(x.grad, own.grad)


def test_the_loss_may_be_compiled() -> None:
    module, x, way = nn.Sequential(*[Block() for _ in range(4)]), batch(7), Way("1f1b", "never")
    plain = copy.deepcopy(module)
    step(module, way, x, loss_fn=torch.compile(mean, backend="aot_eager"))
    mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


def test_a_step_under_compiled_autograd_is_refused() -> None:
    module, x = nn.Sequential(linear(3, 3), linear(3, 3)), batch(4)
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never") as pipe:
        with compiled_autograd._enable(lambda graph: graph):
            with pytest.raises(TransformError, match="compiled autograd.*loss.backward()"):
                pipe.forward_backward(x, loss_fn=mean)


def around_both(pipe: Any, x: Any) -> None:
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        mean(pipe(x), None).backward()


def around_the_backward(pipe: Any, x: Any) -> None:
    loss = mean(pipe(x), None)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        loss.backward()


def in_compiled_code(pipe: Any, x: Any) -> None:
    of_torch: Any = torch
    call = of_torch.compiler.disable(pipe)
    with of_torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: mean(call(x), None).backward(), backend="eager")()


@pytest.mark.parametrize("kind", [Pipe, pipert.pipeline])
@pytest.mark.parametrize("go_back", [around_both, around_the_backward, in_compiled_code])
def test_a_recomputation_under_compiled_autograd_is_refused(kind: Any, go_back: Any) -> None:
    module, x = nn.Sequential(linear(3, 3), linear(3, 3)), batch(4)
    plain = copy.deepcopy(module)
    mean(plain(x), None).backward()
    cuts = [1, 1] if kind is Pipe else ["1"]
    with kind(module, cuts, devices=["cpu"] * 2, chunks=2, checkpoint="always") as pipe:
        with pytest.raises(TransformError, match="compiled autograd.*checkpoint='never'"):
            go_back(pipe, x)
        assert all(parameter.grad is None for parameter in module.parameters())
        pipe.checkpoint = "never"
        go_back(pipe, x)
    same(grads_of(module), grads_of(plain))
