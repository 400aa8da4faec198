"""Copies of skippable layers are of the same class, and belong together as before."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from tests.helpers.skip_layers import Forward

Copy = Callable[[Any], Any]


class Base(Skippable):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Forward:
        for name in self.skip_stashes:
            yield stash(name, x)
        for name in self.skip_pops:
            x = x + (yield pop(name))
        return self.linear(x)


@skippable(stash=["a"])
class Stash(Base):
    pass


@skippable(pop=["a"])
class Pop(Base):
    pass


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Copy] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": saved_and_loaded,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@copies
def test_a_copy_is_of_the_same_class_with_the_same_state(copied: Copy) -> None:
    layer = Stash()
    other = copied(layer)
    assert type(other) is Stash and other is not layer
    for name, tensor in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def two_pairs() -> nn.Sequential:
    first, second = Namespace(), Namespace()
    return nn.Sequential(
        Stash().isolate(first),
        Stash().isolate(second),
        Pop().isolate(first),
        Pop().isolate(second),
    )


@copies
def test_skips_that_belong_together_do_so_in_a_copy(copied: Copy) -> None:
    model = two_pairs()
    other = copied(model)
    verify_skippables(other)
    x = torch.randn(3, 2)
    assert torch.equal(other(x), model(x))
