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

from pipert import Pipe
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


@skippable(stash=["a"])
class Plain(nn.Module):
    """Not derived from Skippable."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x)
        return self.linear(x)


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


@pytest.mark.parametrize("kind", [Stash, Plain])
@copies
def test_a_copy_is_of_the_same_class_with_the_same_state(kind: Any, copied: Copy) -> None:
    layer = kind()
    other = copied(layer)
    assert type(other) is kind and other is not layer
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


@copies
def test_a_copied_namespace_is_equal_to_the_original_and_to_no_other(copied: Copy) -> None:
    namespace = Namespace()
    other = copied(namespace)
    assert other == namespace and hash(other) == hash(namespace) and other != Namespace()


@pytest.mark.parametrize("name", [name for name in COPIES if name != "copy"])
def test_a_copied_pipe_computes_the_same(name: str) -> None:
    model, x = two_pairs(), torch.randn(4, 2)
    with Pipe(model, [1, 2, 1], devices=["cpu"] * 3, chunks=2) as pipe:
        with COPIES[name](pipe) as other:
            torch.testing.assert_close(other(x), pipe(x))
