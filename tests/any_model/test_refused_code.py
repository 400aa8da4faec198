"""Tests code between layers that works in a call, and that a step cannot follow and refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.any_model.piped import How, compare, each_how
from tests.any_model.test_own_code import Exp

NAMES = ["base", "view", "view of the base"]


class ChangingViews(nn.Module):
    """Changes a tensor of an earlier partition, and uses it under another name or too late.

    Args:
        changed: the name by which it is changed.
        used: the name by which it is used.
        later: whether it is used in a later partition.
    """

    def __init__(self, changed: int, used: int, later: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.changed, self.used, self.later = changed, used, later

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) * 1
        names = [y, y[:, :2], y[:, 1:]]
        z = self.b(x)
        names[self.changed].mul_(z[:, :1])
        if self.later:
            z = self.c(z)
        last: Tensor = z + names[self.used].sum(1, keepdim=True)
        if not self.later:
            last = self.c(last)
        return last


@pytest.mark.pairwise
@each_how
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("used", range(3), ids=lambda k: f"used-{NAMES[k]}")
@pytest.mark.parametrize("changed", range(3), ids=lambda k: f"changed-{NAMES[k]}")
def test_a_change_under_another_name_is_right_in_a_call_and_refused_in_a_step(
    changed: int, used: int, later: bool, how: How
) -> None:
    is_followed = changed == used and (later or used == 0)
    refused = how.schedule and not is_followed and "changed in place in a later one, and used under"
    compare(ChangingViews(changed, used, later), ("b", "c"), how, refused or "")


class ChangingForAFunction(nn.Module):
    """Applies a function that no mode sees to a tensor that a later partition has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x) * 1
        z = self.b(x)
        y.mul_(z)
        return self.c(Exp.apply(y))  # type: ignore[no-untyped-call]


@each_how
def test_a_change_before_a_function_of_ones_own_is_right_in_a_call_and_refused_in_a_step(
    how: How,
) -> None:
    refused = "" if not how.schedule else "changed in place in a later one, and used in a custom"
    compare(ChangingForAFunction(), ("b", "c"), how, refused)


class AskingForForces(nn.Module):
    """Differentiates by a tensor of the first partition, in the second one.

    Args:
        directly: whether a part of the gradient does not go back through the first.
        unused: the value of ``allow_unused``.
    """

    def __init__(self, directly: bool, unused: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 20, nn.Linear(4, 4)) for _ in range(3)
        )
        self.directly, self.unused = directly, unused

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        y = self.b(self.a(x))
        energies = y.square() + x.square() if self.directly else y.square()
        (forces,) = torch.autograd.grad(
            energies.sum(), [x], create_graph=True, allow_unused=self.unused
        )
        return self.c(energies * forces)


@pytest.mark.pairwise
@each_how
@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
@pytest.mark.parametrize("directly", [False, True], ids=["", "directly"])
def test_gradients_by_earlier_tensors_are_right_in_a_call_and_refused_in_a_step(
    directly: bool, unused: bool, how: How
) -> None:
    refused = "" if not how.schedule else "goes back into an earlier partition"
    compare(AskingForForces(directly, unused), ("b", "c"), how, refused)


class GoingBack(nn.Module):
    """A model that differentiates a part of its own loss."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.alone = alone

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b(y)
        inputs = [self.b.weight] if self.alone else None
        z.square().sum().backward(retain_graph=True, inputs=inputs)
        return self.c(z + y)


@each_how
@pytest.mark.parametrize("alone", [False, True], ids=["", "alone"])
def test_a_backward_into_an_earlier_partition_is_refused_in_a_step(alone: bool, how: How) -> None:
    refused = "" if alone or not how.schedule else "goes back to the inputs of its partition"
    compare(GoingBack(alone), ("b", "c"), how, refused)


class Transforming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))


class TransformingAll(Transforming):
    """Transforms layers of two partitions."""

    def forward(self, x: Tensor) -> Tensor:
        forces = torch.func.grad(lambda x: self.b(self.a(x).sin()).square().sum())(x)
        y: Tensor = self.c(forces)
        return y


class TransformingWithOthers(Transforming):
    """Transforms a function that uses a tensor of an earlier partition."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.c(self.b(y).sin())
        return torch.func.vmap(lambda row: row * y.mean(0))(z)  # type: ignore[no-any-return]


@each_how
@pytest.mark.parametrize("kind", [TransformingAll, TransformingWithOthers])
def test_a_transform_of_other_partitions_is_right_in_a_call_and_refused_in_a_step(
    kind: type[nn.Module], how: How
) -> None:
    refused = "" if not how.schedule else "torch.func.vmap.*give it tensor.clone"
    compare(kind(), ("b", "c"), how, refused)


class Replacing(nn.Module):
    """A model that calls a layer of the first or second partition with another bias."""

    def __init__(self, name: str, length: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * length) for _ in range(3)
        )
        self.name = name
        self.bias = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        for name, layer in self.named_children():
            if name == self.name:
                x = torch.func.functional_call(layer, {"0.bias": self.bias}, (x,))
            else:
                x = layer(x)
        return x


@each_how
@pytest.mark.parametrize("length", [1, 20], ids=["", "long"])
@pytest.mark.parametrize("name", ["a", "c"])
def test_a_substituted_parameter_is_refused_if_the_layer_is_recomputed(
    name: str, length: int, how: How
) -> None:
    refused = "" if how.checkpoint == "never" else "parameters in place of its own"
    compare(Replacing(name, length), ("b",), how, refused)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grads[0] * y, grads[0] * x


class UsingItUnseen(nn.Module):
    """Uses a tensor that partition 0 made from ``shared`` in an autograd function of partition 1.

    ``shared`` itself is used there as well (``how`` is "parameter"), or a tensor before it in
    partition 0 is another argument of such a function.
    """

    def __init__(self, how: str, clones: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Linear(3, 3)
        self.shared = nn.Parameter(torch.rand(3))
        self.how, self.clones = how, clones

    def forward(self, x: Tensor) -> Any:
        first = self.a(x + self.shared)
        second = first + 2 * x.detach()  # whose node saves nothing: nothing fails, either
        y = self.b(second)
        given = [t.clone() if self.clones else t for t in (first, second)]
        y = Multiply.apply(y, given[1])  # type: ignore[no-untyped-call]
        if self.how == "parameter":
            return y * self.shared
        return Multiply.apply(y, given[0])  # type: ignore[no-untyped-call]


class Held:
    def __init__(self, h: Tensor) -> None:
        self.h = h


class Taking(nn.Module):
    def forward(self, held: Held) -> Tensor:
        return held.h * 2


class PassingObjects(nn.Module):
    """Passes objects that torch cannot flatten; one's tensor was computed from the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.taking = nn.Linear(4, 4), nn.Linear(4, 4), Taking()

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = y.sin()
        return self.b(z) + self.taking(Held(y)) * self.taking(Held(z))


@each_how
def test_tensors_in_objects_passed_to_layers_are_right_in_a_call_and_refused_in_a_step(
    how: How,
) -> None:
    refused = "" if not how.schedule else "in an object or a closure.*register_dataclass"
    compare(PassingObjects(), ("b",), how, refused)


@pytest.mark.parametrize("how", ["parameter", "tensor"])
def test_a_second_backward_through_an_earlier_partition_is_refused(how: str) -> None:
    x, target = torch.rand(4, 3), torch.rand(4, 3)
    for clones in (True, False):
        model = UsingItUnseen(how, clones)
        (model(x) - target).square().mean().backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        refused: Any = contextlib.nullcontext() if clones else pytest.raises(
            RuntimeError, match="made, where a step of a pipe does not see it"
        )
        with pipert.pipeline(model, cuts=["b"], devices=["cpu"] * 2, chunks=2) as pipe, refused:
            pipe.forward_backward(x, target=target, loss_fn=nn.functional.mse_loss)
            for p, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, grad)
