"""Namespaces tell skips of one name apart."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash

Forward = Generator[Any, Any, Any]


@skippable(stash=["a", "b"])
class Stash(Skippable):
    """Stashes its input, ``b`` ten times as much."""

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x)
        yield stash("b", x * 10)
        return x


@skippable(pop=["a", "b"])
class Pop(Skippable):
    """Adds 100 times ``b`` and 10,000 times ``a``."""

    def forward(self, x: Tensor) -> Forward:
        a = yield pop("a")
        b = yield pop("b")
        return x + 100 * b + 10_000 * a


class Add(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def output(*layers: nn.Module) -> float:
    return float(nn.Sequential(*layers)(torch.ones(1, dtype=torch.float64)).item())


def test_a_layer_pops_what_was_stashed_in_its_namespace() -> None:
    namespace = Namespace()
    assert output(Stash().isolate(namespace), Pop().isolate(namespace)) == 11_001


@pytest.mark.parametrize("namespaces", [(Namespace(), None), (None, Namespace())], ids=str)
def test_a_layer_does_not_pop_what_was_stashed_in_another_namespace(
    namespaces: tuple[Namespace | None, Namespace | None],
) -> None:
    with pytest.raises(RuntimeError, match="there is no skip 'a'.* to pop"):
        output(Stash().isolate(namespaces[0]), Pop().isolate(namespaces[1]))


def test_an_error_says_in_which_namespace_there_is_no_skip() -> None:
    namespace = Namespace()
    with pytest.raises(RuntimeError, match=re.escape(f"'a' in {namespace!r} to pop")):
        output(Stash(), Pop().isolate(namespace))


@pytest.mark.parametrize("first", [0, 1])
def test_pairs_of_the_same_names_may_lie_in_each_other_or_cross(first: int) -> None:
    """1 is stashed, then 2; the factor tells which of them was popped first."""
    spaces = [Namespace(), Namespace()]
    popped = output(
        Stash().isolate(spaces[0]),
        Add(1),
        Stash().isolate(spaces[1]),
        Scale(0),
        Pop().isolate(spaces[first]),
        Scale(1_000_000_000),
        Pop().isolate(spaces[1 - first]),
    )
    skips = [11_000, 22_000]
    assert popped == skips[first] * 1_000_000_000 + skips[1 - first]


def test_only_some_names_may_be_isolated() -> None:
    namespace = Namespace()
    layer = Stash().isolate(namespace, only=["a"])
    assert (layer.skip_key("a"), layer.skip_key("b")) == ((namespace, "a"), (None, "b"))


def test_each_name_may_be_in_a_namespace_of_its_own() -> None:
    a, b = Namespace(), Namespace()
    layers = [kind().isolate(a, only=["a"]).isolate(b, only={"b"}) for kind in (Stash, Pop)]
    assert output(*layers) == 11_001


def test_none_takes_a_layer_back_to_the_default_namespace() -> None:
    assert output(Stash().isolate(Namespace()).isolate(None), Pop()) == 11_001


def test_names_that_are_not_declared_cannot_be_isolated() -> None:
    with pytest.raises(ValueError, match=r"the skips \['a', 'b'\], so \['c', 'd'\] cannot"):
        Stash().isolate(Namespace(), only=["d", "a", "c"])


def test_only_must_be_a_list_of_names() -> None:
    with pytest.raises(TypeError, match="only must be a list"):
        Stash().isolate(Namespace(), only="a")


def test_a_namespace_is_equal_to_itself_alone() -> None:
    namespace = Namespace()
    assert namespace == namespace and len({namespace, Namespace(), Namespace()}) == 3


def test_the_repr_tells_namespaces_apart() -> None:
    assert repr(Namespace()) != repr(Namespace())
    assert re.fullmatch(r"<Namespace \w{8}>", repr(Namespace()))
