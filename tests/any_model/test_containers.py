"""Tests lists, dicts and objects that layers receive and add to."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import HOWS, How, assert_equal, results

each_how = pytest.mark.parametrize("how", HOWS, ids=[how.name for how in HOWS])


class Keys(list[Tensor]):
    """A list that torch cannot flatten."""


class Cache(dict[int, Tensor]):
    """A dict that torch cannot flatten."""


class Adding(nn.Module):
    """A layer that adds its output to a container, and computes with the container's items."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 20)

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        is_mapping = isinstance(kept, MutableMapping)
        x = x + torch.stack(list(kept.values() if is_mapping else kept)).sum(0)
        y: Tensor = self.layers(x)
        if is_mapping:
            kept[len(kept)] = y
        else:
            kept.append(y)
        return y


class Model(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(4))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        is_mapping = issubclass(self.kind, MutableMapping)
        kept = self.kind(enumerate([x])) if is_mapping else self.kind([x])
        for block in self.blocks:
            x = block(x, kept)
        return dict(kept) if is_mapping else list(kept)


def family(kind: type) -> Family:
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    return Family("adding", lambda: Made(Model(kind).double(), batch), ("blocks.1", "blocks.3"))


@each_how
@pytest.mark.parametrize("kind", [list, dict])
def test_the_next_layer_sees_an_item_added_to_a_list_or_a_dict(kind: type, how: How) -> None:
    own = family(kind)
    assert_equal(*results(own.make(), own, how))


@pytest.mark.parametrize("how", [how for how in HOWS if how.checkpoint == "never"])
@pytest.mark.parametrize("kind", [OrderedDict, Cache, UserDict, Keys, deque])
def test_the_next_layer_sees_an_item_added_to_a_container_of_another_kind(
    kind: type, how: How
) -> None:
    own = family(kind)
    assert_equal(*results(own.make(), own, how))


def test_a_checkpointed_layer_that_changes_an_object_is_refused() -> None:
    own = family(Keys)
    never, always, *_ = HOWS
    assert_equal(*results(own.make(), own, never))
    with pytest.raises(RuntimeError, match="a layer changes its argument, a Keys, and would do so"):
        results(own.make(), own, always)
