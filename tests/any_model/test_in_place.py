"""Tests layers that change their argument in place, called by the model's own code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.any_model.piped import HOWS, How, compare, each_how


class InPlace(nn.Module):
    """Uses a tensor that a layer has changed, and changes one made between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))
        self.many = nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 20, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.many(self.first(x))
        self.relu(x.sub_(0.5))
        y = self.second(x) + x
        y = y + self.relu(y)
        z: Tensor = self.third(y)
        last: Tensor = self.relu(z) * x + self.head(z + x)
        return last


@each_how
@pytest.mark.parametrize("cuts", [("second",), ("third",), ("second", "third")])
def test_an_in_place_activation_called_by_the_model_works(
    cuts: tuple[str, ...], how: How
) -> None:
    compare(InPlace(), cuts, how)


class Hidden(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class Hiding(nn.Sequential):
    """A layer that takes its input by name."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_other_in_place_layers_are_refused_if_checkpointed() -> None:
    never, always, *_ = HOWS
    for how, refused in ((never, ""), (always, r"argument in place \(float64\[2, 4\]\)")):
        compare(Hiding(nn.Linear(4, 4), Hidden(), nn.Linear(4, 4)), ("2",), how, refused)


class Views(nn.Module):
    """A model that passes a tensor and a view of it to a layer, which changes one of them."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), Both(change), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.last(self.second(x, x[:, :2]))
        return y


class Both(nn.Module):
    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        return self.change(x, view)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, view: x.mul_(2) + view.sum(1, True),
        lambda x, view: view.mul_(2).sum(1, True) + x,
    ],
    ids=["base", "view"],
)
def test_a_step_refuses_a_layer_that_changes_one_of_two_overlapping_arguments(
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model = Views(change)
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(RuntimeError, match="changed in place in a later one, and used under"):
            pipe.forward_backward(torch.ones(4, 4), loss_fn=lambda y, _: y.sum())
    assert all(parameter.grad is None for parameter in model.parameters())
