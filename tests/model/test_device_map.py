"""Tests models with a ``device_map``, as accelerate and transformers leave it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.model.cuts import check_cuts
from pipert.model.device_map import cuts_of_device_map, remove_hooks


class Inner(nn.Module):
    """Its rotary table has no parameters, and is registered last and called first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.norm = nn.LayerNorm(4)
        self.rotary = nn.Dropout(0.0)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.rotary(self.embed(x)) * self.scale
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x))
        return y


def mapped(device_map: dict[str, Any]) -> Model:
    model = Model()
    vars(model)["hf_device_map"] = device_map
    return model


def cuts_of(device_map: dict[str, Any]) -> tuple[list[str], list[str]]:
    model = mapped(device_map)
    cuts, devices = cuts_of_device_map(model)
    assert list(check_cuts(model, cuts)) == cuts
    return cuts, list(map(str, devices))


SPREAD = {
    "inner.embed": 0, "inner.layers.0": 0, "inner.layers.1": 0, "inner.layers.2": 1,
    "inner.layers.3": 1, "inner.norm": 1, "inner.rotary": 1, "inner.scale": 0, "head": 2,
}  # fmt: skip


def test_a_partition_begins_where_the_device_changes() -> None:
    assert cuts_of(SPREAD) == (["inner.layers.2", "head"], ["cuda:0", "cuda:1", "cuda:2"])


def test_a_module_without_parameters_begins_nothing() -> None:
    assert cuts_of({**SPREAD, "inner.rotary": 0}) == cuts_of(SPREAD)


def test_the_whole_model_on_one_device_is_one_partition() -> None:
    assert cuts_of({"": 3}) == ([], ["cuda:3"])


def test_a_name_stands_for_what_is_inside_but_for_names_inside_of_it() -> None:
    cuts, devices = cuts_of({"": 0, "inner.layers.1": 1, "head": 2})
    assert cuts == ["inner.layers.1", "inner.layers.2", "head"]
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "cuda:2"]


def test_a_shared_module_counts_where_it_is_registered_first() -> None:
    model = mapped({"inner": 0, "head": 1, "again": 0, "last": 0})
    model.again = model.head
    model.last = nn.Linear(4, 4)
    assert cuts_of_device_map(model)[0] == ["head", "last"]


def test_the_map_of_a_wrapped_model_is_found_and_its_names_are_those_of_the_wrapper() -> None:
    wrapper = nn.Module()
    wrapper.base = mapped(SPREAD)
    assert cuts_of_device_map(wrapper)[0] == ["base.inner.layers.2", "base.head"]


@pytest.mark.parametrize("where", ["cpu", "disk", torch.device("cpu")])
def test_offloading_is_refused_by_name(where: Any) -> None:
    with pytest.raises(ValueError, match=f"offloads 'head' to '{where}', but .*max_memory"):
        cuts_of({**SPREAD, "head": where})


def test_a_map_that_leaves_out_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no device for \['head'\]; add them, or pass cuts"):
        cuts_of({"inner": 0})


# Hooks


def dispatched(device_map: dict[str, Any]) -> Model:
    big: Any = pytest.importorskip("accelerate.big_modeling")
    model: Model = big.dispatch_model(Model(), device_map, force_hooks=True)
    return model


def test_hooks_of_accelerate_are_removed() -> None:
    model = dispatched({"": "cpu"})
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    assert "_hf_hook" in vars(model.head)
    x = torch.ones(2, 4)
    expected = model(x)
    remove_hooks(model)
    clean = Model()
    for (name, module), other in zip(model.named_modules(), clean.modules(), strict=True):
        left = set(vars(module)) - set(vars(other)) - {"hf_device_map"}
        assert not left, name
    assert model(x).equal(expected)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == keys


def test_the_map_of_accelerate_is_read() -> None:
    model = dispatched({"inner": "cpu", "head": "cpu"})
    assert cuts_of_device_map(model) == ([], [torch.device("cpu")])


@pytest.mark.multi_gpu
def test_a_model_that_is_spread_over_gpus_keeps_its_places() -> None:
    model = dispatched({"inner": 0, "head": 1})
    cuts, devices = cuts_of_device_map(model)
    assert (cuts, devices) == (["head"], [torch.device("cuda:0"), torch.device("cuda:1")])
    remove_hooks(model)
    assert [model.inner.norm.weight.device, model.head.weight.device] == devices


def test_a_forward_that_was_put_on_a_module_stays() -> None:
    pytest.importorskip("accelerate")
    model = Model()
    own = lambda x: x * 2  # noqa: E731
    vars(model.head)["forward"] = own
    hooks: Any = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model.head, hooks.AlignDevicesHook("cpu"))
    remove_hooks(model)
    assert model.head.forward is own


def test_hooks_that_do_something_else_are_refused() -> None:
    hooks: Any = pytest.importorskip("accelerate.hooks")
    for hook in (hooks.AlignDevicesHook("cpu", offload=True), hooks.ModelHook()):
        model = Model()
        hooks.add_hook_to_module(model.head, hooks.AlignDevicesHook("cpu"))
        hooks.add_hook_to_module(model.head, hook, append=True)
        with pytest.raises(ValueError, match="Linear has the hook .*does more than move"):
            remove_hooks(model)
        assert "_hf_hook" in vars(model.head)
