"""Tests lists, dicts and objects that layers receive and add to."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

import pipert
from tests.any_model.piped import HOWS, How, compare, each_how


class Keys(list[Tensor]):
    """A list that torch cannot flatten."""


class Cache(dict[int, Tensor]):
    """A dict that torch cannot flatten."""


@dataclass
class State:
    """An object that torch can flatten."""

    kept: Tensor


register_dataclass(State)


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


CUTS = "blocks.1", "blocks.3"


@each_how
@pytest.mark.parametrize("kind", [list, dict])
def test_the_next_layer_sees_an_item_added_to_a_list_or_a_dict(kind: type, how: How) -> None:
    compare(Model(kind), CUTS, how)


@pytest.mark.parametrize("how", [how for how in HOWS if how.checkpoint == "never"])
@pytest.mark.parametrize("kind", [OrderedDict, Cache, UserDict, Keys, deque])
def test_the_next_layer_sees_an_item_added_to_a_container_of_another_kind(
    kind: type, how: How
) -> None:
    compare(Model(kind), CUTS, how)


def test_a_checkpointed_layer_that_changes_an_object_is_refused() -> None:
    never, always, *_ = HOWS
    compare(Model(Keys), CUTS, never)
    compare(Model(Keys), CUTS, always, "a layer changes its argument, a Keys, and would do so")


def test_checkpointed_layers_that_change_an_object_may_be_exempt() -> None:
    """As those of Gemma3n, which hand keys and values to later layers without a cache, too."""
    model = Model(Keys)
    for block in model.blocks:
        pipert.never_recompute(block)
    _, always, *_ = HOWS
    compare(model, CUTS, always)


class Changing(nn.Module):
    """Returns nothing: what it computes is in its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Any) -> None:
        if isinstance(value, State):
            value.kept = self.linear(value.kept).tanh()
        elif isinstance(value, dict):
            value["kept"] = self.linear(value["kept"]).tanh()
            value["all"].append((value["all"][0], value["kept"]))
        else:
            value.append(self.linear(value[-1]).tanh())


class Chain(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any], get: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Changing() for _ in range(4))
        self.make, self.get = make, get

    def forward(self, x: Tensor) -> Tensor:
        value = self.make(x)
        for block in self.blocks:
            block(value)
        return self.get(value)


def sum_of_pairs(value: Any) -> Tensor:
    products: list[Tensor] = [x * y for x, y in value["all"][1:]]
    total: Tensor = value["kept"] + torch.stack(products).sum(0)
    return total


KINDS: dict[str, tuple[Any, Any]] = {
    "list": (lambda x: [x], lambda value: value[-1] + value[0]),
    "dict": (lambda x: {"kept": x, "all": [x]}, sum_of_pairs),
    "dataclass": (State, lambda value: value.kept),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_changes_in_an_argument_of_leaves(
    kind: str, chunks: int, checkpoint: str
) -> None:
    """With one micro-batch the input of the model is the caller's leaf, which layers do not get."""
    torch.manual_seed(0)
    plain = Chain(*KINDS[kind])
    model = copy.deepcopy(plain)
    x = torch.randn(6, 4, requires_grad=True)
    y = plain(x)
    expected = torch.autograd.grad(y.square().mean(), [x, *plain.parameters()])
    with pipert.pipeline(
        model, CUTS, devices=["cpu"] * 3, chunks=chunks, checkpoint=checkpoint
    ) as pipe:
        if kind == "dataclass" and checkpoint == "always":
            with pytest.raises(RuntimeError, match="a layer changes its argument, a State"):
                pipe(x)
            return
        found = torch.autograd.grad(pipe(x).square().mean(), [x, *model.parameters()])
        torch.testing.assert_close(found, expected)
        pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean())
        in_step = (x.grad, *[p.grad for p in model.parameters()])
        torch.testing.assert_close(in_step, expected)


class Returning(nn.Module):
    """Adds to a list, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        values.append(self.linear(values[-1]).tanh())
        return values


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returning() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = values = [x * 1.0]
        for block in self.blocks:
            values = block(values)
        return torch.stack([*first, *values]).sum(0)


@each_how
def test_a_list_that_a_layer_returns_is_the_one_it_was_given(how: How) -> None:
    compare(Returned(), CUTS, how)


class Filling(nn.Module):
    """A model that adds to what its caller hands in, and takes out what only it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: Any, more: dict[str, Tensor]) -> Tensor:
        x = self.first(x) + more.pop("shift")
        if isinstance(seen, dict):
            seen[len(seen)] = x
        elif seen is not None:
            seen.append(x)
        return self.second(x)  # type: ignore[no-any-return]


def filling(chunks: int, device: str = "cpu") -> tuple[Any, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Filling(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    pipe = pipert.pipeline(model, ["second"], devices=[device] * 2, chunks=chunks)
    return pipe, plain, x


@pytest.mark.parametrize("kind", [dict, list, Keys])
def test_with_one_micro_batch_a_container_that_a_forward_fills_is_the_caller_s(kind: type) -> None:
    pipe, plain, x = filling(chunks=1)
    with pipe:
        mine, its = kind(), kind()
        for _ in range(2):
            torch.testing.assert_close(
                pipe.module(x, its, {"shift": x}), plain(x, mine, {"shift": x})
            )
        assert len(its) == len(mine) == 2
        for k in range(2):
            torch.testing.assert_close(its[k], mine[k])


@pytest.mark.parametrize("kind", [dict, list, Keys])
def test_with_several_a_container_that_a_forward_fills_is_refused(kind: type) -> None:
    pipe, plain, x = filling(chunks=2)
    with pipe:
        with pytest.raises(ValueError, match=r"adds to a list or a mapping.*chunks=1"):
            pipe.module(x, seen=kind(), more={"shift": x})
        more = {"shift": x}
        torch.testing.assert_close(pipe.module(x, None, more), plain(x, None, dict(more)))
