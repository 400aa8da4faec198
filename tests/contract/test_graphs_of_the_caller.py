"""Tests tensors that the caller computed with a graph and several micro-batches use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from pipert import Pipe
from tests.helpers.ways import (
    Way,
    batch,
    each_way,
    grads_of,
    linear,
    piped,
    same,
    take_step,
    ways,
)
from tests.layers import Apply

CHUNKS = 4


def model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 4), *more, linear(4, 2))


def leaf(*size: int) -> Tensor:
    return torch.rand(size, dtype=torch.float64).requires_grad_()


class Learned:
    """The caller's leaves, tensors computed from them before a step, and layers that use these."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(5)
        self.leaves = [leaf(), leaf(2), leaf(4, 4)]
        self.kind = kind
        self.used: Any = None
        self.module = model(Apply(self.in_layer), Apply(self.in_layer))

    def compute(self) -> None:
        scale, bias, weight = self.leaves[:3]
        # Each of these saves something, and goes back only once. The last two share a part.
        trunk = (scale.exp() * weight.tanh()).sin()
        self.used = scale.exp(), (bias * scale).cos(), trunk @ weight

    def in_layer(self, x: Tensor) -> Any:
        if self.kind in ("layers", "both"):
            return x @ self.used[2]
        return x

    def loss(self, output: Tensor, target: Any) -> Any:
        if self.kind in ("loss", "both"):
            return ((output + self.used[1]) / self.used[0]).square().mean()
        if self.kind == "loss alone":
            return (output.detach() + self.used[1]).square().mean()
        if self.kind == "nothing else":
            return self.used[0] * 1.0
        return output.square().mean()

    def grads(self) -> list[Any]:
        return [leaf.grad for leaf in self.leaves] + [grads_of(self.module)]

    def clear(self) -> None:
        for parameter in [*self.leaves, *self.module.parameters()]:
            parameter.grad = None


KINDS = ["loss", "layers", "both", "loss alone", "nothing else"]


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("balance", [[2, 1, 2, 1], [6]], ids=len)
def test_all_micro_batches_may_use_a_graph_of_the_caller(
    balance: list[int], kind: str, way: Way
) -> None:
    """In two steps, since the numbers of nodes differ in the second."""
    learned, x = Learned(kind), batch(9, requires_grad=True)
    with piped(learned.module, balance, way, chunks=CHUNKS) as pipe:
        for _ in range(2):
            learned.compute()
            expected = learned.loss(learned.module(x), None)
            expected.backward()
            grads, dx = learned.grads(), x.grad
            learned.clear()
            x.grad = None
            learned.compute()
            loss = take_step(pipe, way, x, loss_fn=learned.loss)
            same(loss, expected.detach())
            same(learned.grads(), grads)
            same(x.grad, dx)
            learned.clear()
            x.grad = None


@pytest.mark.multi_gpu
@pytest.mark.parametrize("home", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_graph_of_the_caller_may_be_on_any_device(home: str, streams: bool) -> None:
    weight = leaf(4, 4)
    there: Any = weight.detach().to(home).requires_grad_()
    used: Any = None

    def layer(x: Tensor) -> Any:
        return x @ used.to(x.device)

    module, x = model(Apply(layer), Apply(layer)), batch(9)
    plain = copy.deepcopy(module)
    used = weight.tanh().exp()
    expected = plain(x).square().mean()
    expected.backward()
    devices = ["cuda:0", "cuda:1", "cuda:0"]
    with Pipe(module, [2, 2, 2], devices=devices, chunks=CHUNKS) as pipe:
        make: Any = torch.cuda.Stream
        with torch.cuda.stream(make("cuda:1") if streams else None):
            used = there.tanh().exp()
            loss = pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean())
            leaves: list[Any] = [there, *module.parameters()]
            found = [loss.cpu(), *(parameter.grad.cpu() for parameter in leaves)]
    same(found, [expected.detach(), weight.grad, *(p.grad for p in plain.parameters())])


# parametrize.cached() -----------------------------------------------------------------------------


class Cube(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        Cube.calls += 1
        return weight**3


def cubed(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Cube())


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("parametrization", [cubed, weight_norm, orthogonal])
def test_a_cached_parametrization_is_that_of_the_plain_module(
    parametrization: Callable[[nn.Module], Any], way: Way
) -> None:
    module, x = model(), batch(9)
    parametrization(module[2])
    plain = copy.deepcopy(module)
    with piped(module, [2, 2], way, chunks=CHUNKS) as pipe:
        for _ in range(2):
            with parametrize.cached():
                loss = take_step(pipe, way, x, loss_fn=lambda y, _: y.square().mean())
            with parametrize.cached():
                expected = plain(x).square().mean()
            expected.backward()
            same(loss, expected.detach())
    same(grads_of(module), grads_of(plain))


@ways
def test_a_cached_parametrization_is_computed_once_in_a_step(way: Way) -> None:
    module = model()
    cubed(module[0])
    with piped(module, [2, 2], way, chunks=CHUNKS) as pipe, parametrize.cached():
        Cube.calls = 0
        take_step(pipe, way, batch(9), loss_fn=lambda y, _: y.square().mean())
    assert Cube.calls == 1
