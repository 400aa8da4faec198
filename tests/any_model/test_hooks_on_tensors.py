"""Tests hooks on tensors of other partitions: of the model's own code, and of layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import CHUNKS, HOWS, How, compare, each_how, pipeline, step
from tests.any_model.reference import first_rows, reference


class Hooking(nn.Module):
    """A layer that puts a hook on its argument, or on a clone.

    Args:
        what: the method that asks for the gradient.
        length: the length of its chain of layers; a short one keeps its graph when recomputed.
    """

    def __init__(self, what: str, clones: bool, length: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * length)
        self.what, self.clones = what, clones

    def forward(self, x: Tensor) -> Any:
        if self.clones:
            x = x.clone()
        if self.what == "hook":
            x.register_hook(torch.square)  # type: ignore[no-untyped-call]
        else:
            x.retain_grad()
        return self.layers(x)


class Model(nn.Module):
    """Calls the layer that hooks in the partition of its argument, or in a later one."""

    def __init__(self, what: str, later: bool, clones: bool, length: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hooking = Hooking(what, clones, length)
        self.later = later

    def forward(self, x: Tensor) -> Any:
        x = self.a(x) * 1
        y = x if self.later else self.hooking(x)
        z = self.b(y)
        return (self.hooking(y) if self.later else y) * z


def family(model: nn.Module) -> Family:
    made = Made(model.double(), {"x": torch.randn(ROWS, 4, dtype=torch.float64)})
    return Family("hooking", lambda: made, ("b",))


@each_how
@pytest.mark.parametrize("length", [20, 1], ids=["", "short"])
@pytest.mark.parametrize("clones", [False, True], ids=["", "clones"])
@pytest.mark.parametrize("later", [False, True], ids=["same partition", "later"])
def test_a_hook_of_a_layer_sees_a_whole_gradient_once_or_is_refused(
    later: bool, clones: bool, length: int, how: How
) -> None:
    is_refused = how.checkpoint != "never" or how.schedule and later
    refused = "a layer registers a hook on its argument" if is_refused and not clones else ""
    compare(Model("hook", later, clones, length), ("b",), how, refused)


@pytest.mark.parametrize("how", [HOWS[1], HOWS[3]], ids=["recomputed", "step"])
def test_a_layer_that_retains_the_gradient_of_its_argument_is_refused(how: How) -> None:
    compare(Model("retain", True, False, 1), ("b",), how, "or retains its gradient")


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_a_hook_of_a_layer_on_a_copied_tensor_is_refused() -> None:
    own = family(Model("hook", True, False, 1))
    with pipeline(own.make().model, own, "never", devices=["cuda:0", "cuda:1"]) as pipe:
        with pytest.raises(RuntimeError, match="a layer registers a hook on its argument"):
            pipe(**own.make().batch)


class Retaining(nn.Module):
    """A model whose own code retains a gradient in the first partition, and in the second."""

    def __init__(self, later: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.later = later
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if not self.later:
            y.retain_grad()
        z = self.b(y) * y
        if self.later:
            y.retain_grad()
        self.kept.append(y)
        return z + y


@each_how
@pytest.mark.filterwarnings("ignore::pipert.SharedStateWarning")
@pytest.mark.parametrize("later", [False, True])
def test_a_model_that_retains_a_gradient_gets_the_whole_gradient(later: bool, how: How) -> None:
    own = family(Retaining(later))
    model, batch = own.make()
    plain: Any = copy.deepcopy(model)
    reference(plain, first_rows(batch, how.rows), own.loss, CHUNKS)
    step(model, batch, own, how)
    found: Any = model
    for tensor, other in zip(found.kept, plain.kept, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)
