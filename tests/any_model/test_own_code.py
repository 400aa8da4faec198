"""Tests the code of models between their layers: any code, whose values may cross partitions."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipert import RecomputationError
from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import How, assert_equal, in_each_how, results

MODELS: list[type[Three]] = []


class Three(nn.Module):
    """Three layers, each large enough to be one node when it is recomputed."""

    cuts: tuple[str, ...] = ("b", "c")
    needs_example = False

    def __init_subclass__(cls) -> None:
        MODELS.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 20, nn.Linear(4, 4)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(4))


# The order of calls -------------------------------------------------------------------------------


class CalledTwice(Three):
    def forward(self, x: Tensor) -> Any:
        return self.c(self.a(self.b(self.a(x))))


class InReverse(Three):
    """A model that calls its layers in reverse; an example finds their partitions."""

    cuts = ("b", "a")
    needs_example = True

    def forward(self, x: Tensor) -> Any:
        return self.a(self.b(self.c(x)))


class Looping(Three):
    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.c(self.b(self.a(x))) + x
        return x


class ReturningEarly(Three):
    def forward(self, x: Tensor) -> Any:
        for layer in (self.a, self.b):
            x = layer(x)
            if x.sum() > 0:
                break
        return self.scale * x


class LeavingOneOut(Three):
    def forward(self, x: Tensor) -> Any:
        return self.c(self.a(x))


# Values -------------------------------------------------------------------------------------------


class Skipping(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b({"some": [y, (y,)]}["some"][1][0])
        return {"last": [self.c(z) * y, (y, z)], "none": None, "name": "skipping"}


class ChangingInPlace(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b(y * 2)
        y += z
        y[:, :2] = 0
        rows = y.new_zeros(len(x), 8)
        rows[:, :4] = y
        rows[:, 4:] = z
        return self.c(y.mul(2)) + rows[:, :4] * rows[:, 4:]


class FillingWhatIsOld(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        rows = y.new_zeros(len(x), 8)
        rows[:, :4] = y
        rows[:, 4:] = self.b(y)
        last = self.c(rows[:, 4:])
        return last + rows[:, :4] * rows[:, 4:]


class ChangingUnderTwoNames(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        kept = [y]
        z = self.b(y.clone())
        y += z
        return self.c(z) + kept[0] * y


class ScalingByParameters(Three):
    def forward(self, x: Tensor) -> Any:
        z = self.b(self.a(x) * self.scale)
        weight = self.c.get_parameter("0.weight")
        return self.c(z * self.scale) + F.linear(z, weight) @ self.scale.diag()


mask: ContextVar[Tensor] = ContextVar("mask")


class KeepingAMask(Three):
    """Keeps a mask, but not on the module, where the next micro-batch would overwrite it."""

    def forward(self, x: Tensor) -> Any:
        mask.set(x > 0)
        return self.c(self.b(self.a(x))) * mask.get()


# Gradients ----------------------------------------------------------------------------------------


class WithoutGradients(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        with torch.no_grad():
            kept = self.b(y) + y
        return self.c(y + kept) + self.b(y)


class AskingForGradients(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        leaf = y.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
        return self.c(y + gradient)


class AskingForGradientsOfLayers(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b(self.b(y))
        (gradient,) = torch.autograd.grad(z.square().sum(), y, create_graph=True)
        (constant,) = torch.autograd.grad(z.pow(3).sum(), y, retain_graph=True)
        return self.c(z + gradient + constant)


class TransformingClones(Three):
    """Transforms functions of clones, which belong to the current partition."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b(y)
        y2 = y.clone()
        u = torch.func.vmap(lambda row, other: row * other * y.mean(0))(z, y2)
        v = torch.func.grad(lambda y: (y.square() * z * self.scale).sum())(y2)
        out = self.c(u + v)
        return out + torch.func.vmap(self.b)(z.clone())


class UsingGradientsLater(Three):
    """Uses gradients with a graph, made by a backward in the middle of the forward."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        leaf = y.detach().requires_grad_()
        (first,) = torch.autograd.grad((self.a(leaf) ** 3).sum(), leaf, create_graph=True)
        z = self.b(y) + first
        leaf = z.detach().requires_grad_()
        (second,) = torch.autograd.grad((self.b(leaf) ** 3).sum(), leaf, create_graph=True)
        return self.c(z + second) * first + second


DIFFERENTIATING_LAYERS = [AskingForGradientsOfLayers, UsingGradientsLater]
"""They ask for gradients with a graph, which those of recomputed layers have not."""


class Jacobians(Three):
    """Computes the Jacobian of each row, by nested transforms, the inner one for gradients."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        u = self.b(y)
        z = torch.func.vmap(torch.func.jacrev(lambda row: self.b(row) * self.scale))(y.clone())
        return self.c(z.sum(-1)) + u


class CheckpointingItself(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = checkpoint(lambda y: self.b(y) * y, y, use_reentrant=False)
        return self.c(z) + y


class HookingTensors(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        y.register_hook(lambda gradient: 2 * gradient)
        z = self.b(y)
        z.register_hook(lambda gradient: 3 * gradient)
        return self.c(z + y)


class HookingLate(Three):
    """Hooks tensors of earlier partitions whose gradients come from several partitions."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b(y)
        y.register_hook(torch.square)
        u = self.c(z + y)
        y.register_hook(torch.tanh)
        z.mul_(2)
        z.register_hook(torch.square)
        return u + z * y


class HookingModules(Three):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.b.register_full_backward_hook(_double)
        self.b[4].register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


def _double(module: nn.Module, dx: Any, dy: Any) -> Any:
    return tuple(2 * d for d in dx)


class FirstWithoutGradients(Three):
    """Uses a tensor copied without gradients once more with gradients."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        with torch.no_grad():
            weights = self.b(y).softmax(-1)
        y = self.b(y) + y * self.scale * weights
        return self.c(y) + y


class FirstInInferenceMode(Three):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        with torch.inference_mode():
            most = self.b(y * self.scale).max() + self.a(x).max()
        z = self.b(y * self.scale) * self.a(x)
        return self.c(z) * most.item()


class Frozen(Three):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


def family(model: type[Three], **batch: Any) -> Family:
    batch = batch or {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    example = batch if model.needs_example else None
    made = Made(model().double(), batch)
    return Family(model.__name__, lambda: made, model.cuts, example=example)


@pytest.mark.filterwarnings("ignore:no partition begins at:UserWarning")  # some leave cuts out
@pytest.mark.parametrize(("model", "how"), in_each_how(MODELS))
def test_code_between_layers_has_the_plain_models_results(model: type[Three], how: How) -> None:
    own = family(model)
    if how.checkpoint != "never" and model in DIFFERENTIATING_LAYERS:
        with pytest.raises(RecomputationError, match="create_graph=True .* checkpoint='never'"):
            results(own.make(), own, how)
    else:
        assert_equal(*results(own.make(), own, how))
