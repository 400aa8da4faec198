"""Layers that change their argument in place, where the model calls them itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import HOWS, How, assert_equal, results

each_how = pytest.mark.parametrize("how", HOWS, ids=[how.name for how in HOWS])


class InPlace(nn.Module):
    """Uses what a layer has changed under its old name, and changes what glue has made."""

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


def family(cuts: tuple[str, ...], model: nn.Module) -> Family:
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    return Family("in place", lambda: Made(model.double(), batch), cuts)


@each_how
@pytest.mark.parametrize("cuts", [("second",), ("third",), ("second", "third")])
def test_an_activation_in_place_works_where_the_model_calls_it(
    cuts: tuple[str, ...], how: How
) -> None:
    own = family(cuts, InPlace())
    assert_equal(*results(own.make(), own, how))


class Hidden(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class Hiding(nn.Sequential):
    """Takes its input by name."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_another_layer_that_does_so_is_refused_where_it_is_checkpointed() -> None:
    own = family(("2",), Hiding(nn.Linear(4, 4), Hidden(), nn.Linear(4, 4)))
    never, always, *_ = HOWS
    assert_equal(*results(own.make(), own, never))
    with pytest.raises(RuntimeError, match=r"changes its argument in place \(float64\[2, 4\]\)"):
        results(own.make(), own, always)
