"""Tests layers that are called in a later partition than their own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import How, assert_equal, compare, each_how, step


class Late(nn.Module):
    """A model that calls a layer after the cut that follows the layer in the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Sequential(layer, *[nn.Linear(4, 4), nn.Tanh()] * 20)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        y: Tensor = self.third(self.layer(self.layer(x)))
        return y


def family(layer: nn.Module) -> Family:
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    return Family("late", lambda: Made(Late(layer).double(), batch), ("second", "third"))


@each_how
def test_statistics_of_a_layer_called_later_are_updated_once(how: How) -> None:
    compare(Late(nn.BatchNorm1d(4)), ("second", "third"), how._replace(rows=ROWS))


@each_how
def test_a_layer_called_later_draws_seeded_numbers_and_replays_them(how: How) -> None:
    own = family(nn.Dropout(0.5))
    model, batch = own.make()
    found = []
    for each in (how, how._replace(checkpoint="never")):
        torch.manual_seed(3)
        found.append(step(copy.deepcopy(model), batch, own, each))
    assert_equal(*found)
