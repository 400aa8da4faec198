"""Tests code between layers that works in a call, and that a step cannot follow and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.piped import How, compare, each_how

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
    refused = how.schedule and not is_followed and "under another name, such as a view"
    compare(ChangingViews(changed, used, later), ("b", "c"), how, refused or "")


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = gradients[0] * x.exp()
        return dx


class ApplyingAFunction(nn.Module):
    """Applies a function, which no mode sees, to a tensor of an earlier partition, or a clone."""

    def __init__(self, clones: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.clones = clones

    def forward(self, x: Tensor) -> Any:
        y = self.a(x) * 1
        z = self.b(x)
        y.mul_(z)
        if self.clones:
            y = y.clone()
        return self.c(Exp.apply(y) + z)  # type: ignore[no-untyped-call]


@each_how
@pytest.mark.parametrize("clones", [False, True], ids=["", "clones"])
def test_a_function_of_ones_own_is_refused_in_a_step_unless_it_gets_a_clone(
    clones: bool, how: How
) -> None:
    refused = "" if clones or not how.schedule else "in a custom autograd function"
    compare(ApplyingAFunction(clones), ("b", "c"), how, refused)


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
    in_call = "goes back through a partition that is recomputed" * (how.checkpoint == "always")
    refused = in_call if not how.schedule else "goes back into an earlier partition"
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


class TransformingALayer(Transforming):
    """Transforms a layer that begins a partition."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.func.vmap(self.b)(self.a(x)))
        return y


class TransformingWithOthers(Transforming):
    """Transforms a function that uses a tensor of an earlier partition."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.c(self.b(y).sin())
        return torch.func.vmap(lambda row: row * y.mean(0))(z)  # type: ignore[no-any-return]


@each_how
@pytest.mark.parametrize("kind", [TransformingAll, TransformingALayer, TransformingWithOthers])
def test_a_transform_of_other_partitions_is_right_in_a_call_and_refused_in_a_step(
    kind: type[nn.Module], how: How
) -> None:
    refused = "" if not how.schedule else "in a transform of torch.func|give it tensor.clone"
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
