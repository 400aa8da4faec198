"""Tests the warning about layers whose dimension 0 is time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import NotBatchFirstWarning, Pipe


class Block(nn.Module):
    """A user's layer around one of torch's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": lambda **options: nn.LSTM(4, 4, **options),
    "GRU": lambda **options: nn.GRU(4, 4, **options),
    "RNN": lambda **options: nn.RNN(4, 4, **options),
    "MultiheadAttention": lambda **options: nn.MultiheadAttention(4, 2, **options),
    "TransformerEncoderLayer": lambda **options: nn.TransformerEncoderLayer(4, 2, 8, **options),
    "TransformerDecoderLayer": lambda **options: nn.TransformerDecoderLayer(4, 2, 8, **options),
    "Transformer": lambda **options: nn.Transformer(4, 2, 1, 1, 8, **options),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)


def make(*layers: nn.Module) -> None:
    Pipe(nn.Sequential(*layers), [len(layers)], devices=["cpu"]).close()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@each_layer
def test_a_layer_that_takes_time_first_is_named_with_a_remedy(kind: str) -> None:
    layer = LAYERS[kind]()
    with pytest.warns(NotBatchFirstWarning, match=r"'1.*batch_first=True") as caught:
        make(nn.Identity(), layer)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_place_in_a_layer_of_the_users_is_named() -> None:
    with pytest.warns(NotBatchFirstWarning, match=r"'0.inner' \(batch_first"):
        make(Block(nn.LSTM(4, 4)))


def test_the_warning_is_justified() -> None:
    """If time is split, the states of an LSTM begin anew in each micro-batch."""
    x, plain = torch.randn(6, 3, 4), nn.LSTM(4, 4)

    class First(nn.Module):
        def forward(self, y: Any) -> Any:
            return y[0]

    with pytest.warns(NotBatchFirstWarning):
        pipe = Pipe(nn.Sequential(plain, First()), [1, 1], devices=["cpu"] * 2, chunks=2)
    with pipe, torch.no_grad():
        assert not torch.allclose(pipe(x), plain(x)[0])
