"""Tests that hooks of a layer on an argument with other users see the whole gradient, once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import CHUNKS, HOWS, How, assert_equal, pipeline, results, step
from tests.any_model.reference import first_rows, reference
from tests.any_model.same import assert_same

each_how = pytest.mark.parametrize("how", HOWS, ids=[how.name for how in HOWS])

Hook = Callable[[Tensor], Tensor]


class Hooking(nn.Module):
    """A layer that puts a hook on its argument.

    Args:
        length: the length of its chain of layers; a short one keeps its graph when recomputed.
    """

    def __init__(self, hook: Hook, length: int = 20) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * length, nn.Linear(4, 4))
        self.hook = hook

    def forward(self, x: Tensor, *others: Any) -> Any:
        x.register_hook(self.hook)  # type: ignore[no-untyped-call]
        return self.layers(x)


class Model(nn.Module):
    cuts = "b", "c", "d"

    def __init__(self, length: int = 20) -> None:
        super().__init__()
        hooks: list[Hook] = [torch.tanh, torch.square, torch.sin, lambda g: g * 1.5]
        self.a, self.b, self.c, self.d = (Hooking(hook, length) for hook in hooks)
        self.first = nn.Linear(4, 4)


class UsedByOthers(Model):
    """Uses the argument earlier, later, in the same partition and in other hooking layers."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        y = self.a(x) * x
        z = self.b(y) + y
        return self.d(self.c(y) + z) * y + x


class UsedAlone(Model):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(self.a(self.first(x)))))


class HookedBetween(Model):
    """Also hooks the argument in the model's own code, before one layer and after another."""

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        z = self.b(y)
        y.register_hook(torch.exp)
        u = self.c(y)
        y.register_hook(torch.cos)
        return self.d(y) * y + z * u


class InAList(Model):
    """Passes a list, which then holds the tensor that the layer received."""

    def forward(self, x: Tensor) -> Any:
        ys = [self.first(x), x]
        first = ys[0]
        z = self.b(ys[0], ys)
        u = self.c(ys[0], ys)
        ys[0].register_hook(torch.cos)
        return self.d(ys[0], ys) * first + z * u


class OfOneOperation(Model):
    """Hooks tensors that are outputs of one node."""

    def forward(self, x: Tensor) -> Any:
        y, z = torch.stack([self.first(x), x]).unbind()
        return self.c(z) + self.b(z) * y + self.d(y) + y + z


class HookingOnly(nn.Module):
    def forward(self, x: Tensor) -> Any:
        x.register_hook(torch.sin)  # type: ignore[no-untyped-call]
        return x.sum(1, keepdim=True)


class Changed(Model):
    """Changes the argument in place between two hooks."""

    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.hooked = HookingOnly()

    def forward(self, x: Tensor) -> Any:
        y = self.first(x) * 1
        z = self.b(y.clone()) + self.hooked(y)
        y.mul_(z.detach())
        z = z + self.hooked(y)
        return self.c(y.clone()) + z * y + self.hooked(y)


class TakenOff(Model):
    """Removes the last hook by its handle."""

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        kept: list[Any] = []
        z = self.b(y)
        u = self.c(y)
        kept.append(y.register_hook(torch.exp))
        out = self.d(u * y + z)
        kept[0].remove()
        return out + y


MODELS = [
    UsedByOthers, UsedAlone, HookedBetween, InAList, OfOneOperation, Changed, TakenOff,
]  # fmt: skip


def family(model: nn.Module) -> Family:
    made = Made(model.double(), {"x": torch.randn(ROWS, 4, dtype=torch.float64)})
    return Family(type(model).__name__, lambda: made, Model.cuts)


@each_how
@pytest.mark.parametrize("length", [20, 1], ids=["", "short"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_hook_of_a_layer_sees_the_whole_gradient_once(
    model: type[Model], length: int, how: How
) -> None:
    own = family(model(length))
    assert_equal(*results(own.make(), own, how))


@pytest.mark.cuda
@pytest.mark.multi_gpu
@each_how
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_hook_of_a_layer_sees_the_whole_gradient_once_on_gpus(
    model: type[Model], how: How
) -> None:
    own = family(model())
    module, batch = own.make()
    plain = reference(copy.deepcopy(module), first_rows(batch, how.rows), own.loss, CHUNKS)
    devices = [f"cuda:{j % torch.cuda.device_count()}" for j in range(4)]
    found = step(module, batch, own, how, devices=devices)
    grads = {name: None if g is None else g.cpu() for name, g in found.grads.items()}
    assert_same(grads, plain.grads, slack=10)


class UsingItsInput(Model):
    def forward(self, x: Tensor) -> Any:
        return self.b(x) * self.first(x) + self.d(x) + x


@each_how
def test_a_hook_of_a_layer_on_an_input_sees_the_whole_gradient_once(how: How) -> None:
    model = UsingItsInput().double()
    x = torch.randn(how.rows, 4, dtype=torch.float64, requires_grad=True)
    alone = x.detach().requires_grad_()  # which keeps the hooks
    (plain,) = torch.autograd.grad(model(alone).square().mean(), alone)
    own = Family("input", lambda: Made(model, {}), Model.cuts)
    with pipeline(model, own, how.checkpoint) as pipe:
        if how.schedule:
            pipe.forward_backward(
                x, target=None, loss_fn=lambda y, _: y.square().mean(), schedule=how.schedule
            )
        else:
            pipe(x).square().mean().backward()
    torch.testing.assert_close(x.grad, plain)


class Retaining(nn.Module):
    """A layer that retains the gradient of its argument."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * length)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        x.retain_grad()
        self.kept.append(x)
        return self.layers(x)


class ModelRetaining(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.b = Retaining(length)
        self.c, self.d = Hooking(torch.tanh, length), Retaining(length)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        self.kept.append(y)
        z = self.b(y) * y
        return self.d(self.c(y) + z) * y


def kept(model: Any) -> list[Tensor]:
    return [*model.kept, *model.b.kept, *model.d.kept]


@each_how
@pytest.mark.filterwarnings("ignore::pipert.SharedStateWarning")
@pytest.mark.parametrize("length", [20, 1], ids=["", "short"])
def test_a_layer_that_retains_its_arguments_gradient_gets_the_whole_gradient(
    length: int, how: How
) -> None:
    own = family(ModelRetaining(length))
    model, batch = own.make()
    plain = copy.deepcopy(model)
    reference(plain, first_rows(batch, how.rows), own.loss, CHUNKS)
    step(model, batch, own, how)
    expected = kept(plain)
    found = kept(model)
    assert len(found) >= len(expected)
    for tensor in found:
        grads = [other.grad for other in expected if torch.equal(other, tensor)]
        assert grads, tensor
        torch.testing.assert_close(tensor.grad, grads[0])
