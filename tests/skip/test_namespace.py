"""Namespaces tell skips of one name apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash
from tests.helpers.skip_layers import Forward


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


def output(*layers: nn.Module) -> float:
    return float(nn.Sequential(*layers)(torch.ones(1, dtype=torch.float64)).item())


def test_each_name_may_be_in_a_namespace_of_its_own() -> None:
    a, b = Namespace(), Namespace()
    layers = [kind().isolate(a, only=["a"]).isolate(b, only={"b"}) for kind in (Stash, Pop)]
    assert output(*layers) == 11_001


def test_names_that_are_not_declared_cannot_be_isolated() -> None:
    with pytest.raises(ValueError, match=r"the skips \['a', 'b'\], so \['c', 'd'\] cannot"):
        Stash().isolate(Namespace(), only=["d", "a", "c"])


def test_only_must_be_a_list_of_names() -> None:
    with pytest.raises(TypeError, match="only must be a list"):
        Stash().isolate(Namespace(), only="a")
