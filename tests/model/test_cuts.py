"""Tests where a model is cut: which names are cuts, what the layers are, and where they live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.model.cuts import check_cuts, homes, homes_outside_of_layers, layers_of
from tests.helpers.torchscript import uses_torchscript


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y if table is None else y + table


class Decoder(nn.Module):
    """A list of blocks; what is registered last is called first, as in many a transformer."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(4)
        self.rotary = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.rotary(x)
        for layer in self.layers:
            x = layer(x, table)
        y: Tensor = self.norm(x * self.scale)
        return y


class Model(nn.Module):
    """An embedding, a decoder and a head; the model has a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.decoder = Decoder()
        self.head = nn.Linear(4, 4)
        self.offset = nn.Parameter(torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.decoder(self.embed(x + self.offset)))
        return y


NAMES = ["embed", "decoder.rotary", *[f"decoder.layers.{k}" for k in range(3)], "decoder.norm"]
ORDER = [*NAMES, "head"]  # of first calls


def refused(names: Any, model: nn.Module | None = None) -> str:
    with pytest.raises(ValueError) as error:
        check_cuts(model or Model(), names)
    return str(error.value)


# Names


def test_cuts_are_the_names_in_the_order_given() -> None:
    assert check_cuts(Model(), (name for name in ("head", "decoder.layers.1"))) == (
        "head",
        "decoder.layers.1",
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [("head", "must be a list of names, .* got 'head'"), ([3], "got .3."), (3, "got 3; for a ")],
)
def test_a_value_that_is_no_list_of_names_is_refused(names: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        check_cuts(Model(), names)


@pytest.mark.parametrize("name", ["decoder.layer.1", "layers.1"])
def test_an_unknown_name_is_refused_with_those_that_may_be_meant(name: str) -> None:
    told = refused([name])
    assert f"no module {name!r}; did you mean " in told
    assert "'decoder.layers.1'" in told


def test_all_mistakes_are_reported_at_once() -> None:
    told = refused(["xyz", "head", "head", ""])
    assert "'xyz'" in told
    assert "'head' is given twice" in told
    assert "'' is the whole model" in told


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict, nn.ParameterList])
def test_a_container_that_is_never_called_is_refused(kind: Any) -> None:
    model = Model()
    model.part = kind()
    assert f"'part' ({kind.__name__}) is never called" in refused(["part"], model)


def test_a_list_with_a_forward_that_was_put_on_it_and_back_is_still_never_called() -> None:
    # As accelerate does it: the attribute of the class comes back as one of the object.
    model = Model()
    model.decoder.layers.forward = model.decoder.layers.forward
    assert "never called" in refused(["decoder.layers"], model)


def test_a_cut_inside_of_a_cut_is_refused() -> None:
    told = refused(["decoder.layers.1", "decoder"])
    assert "'decoder.layers.1' is inside the cut 'decoder'" in told


def test_one_module_under_two_names_is_refused() -> None:
    model = Model()
    model.again = model.head
    assert "'again' is the same module as 'head'" in refused(["head", "again"], model)
    assert check_cuts(model, ["head"]) == ("head",)


@pytest.mark.parametrize("whole", [False, True])
def test_a_cut_inside_of_a_compiled_module_is_refused(whole: bool) -> None:
    model = Model()
    container = model if whole else model.decoder
    container._compiled_call_impl = container._call_impl  # as compile() does, but takes seconds
    where = "the model" if whole else "'decoder'"
    assert f"is inside {where}, which is compiled" in refused(["decoder.layers.1"], model)


@uses_torchscript
def test_a_cut_inside_of_a_scripted_module_is_refused() -> None:
    model = Model()
    model.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    assert "inside 'scripted', which is compiled or scripted" in refused(["scripted.0"], model)
    assert check_cuts(model, ["scripted"]) == ("scripted",)
    assert "no module 'scripted.1'" in refused(["scripted.1"], model)


def test_a_compiled_layer_may_be_a_cut() -> None:
    model = Model()
    model.decoder.layers[1]._compiled_call_impl = model.decoder.layers[1]._call_impl
    assert check_cuts(model, ["decoder.layers.1"]) == ("decoder.layers.1",)


# Layers


def names_of(cuts: Sequence[str], model: nn.Module | None = None) -> list[str]:
    return list(layers_of(model or Model(), cuts))


def test_layers_are_the_largest_modules_without_a_cut_inside() -> None:
    assert names_of(["head"]) == ["embed", "decoder", "head"]
    inner = ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2"]
    assert names_of(["decoder.layers.1"]) == [
        "embed", *inner, "decoder.norm", "decoder.rotary", "head",
    ]  # fmt: skip


def test_the_model_is_the_only_layer_without_cuts() -> None:
    model = Model()
    assert layers_of(model, []) == {"": model}


def test_a_list_without_a_cut_is_no_layer_but_its_elements_are() -> None:
    model = Model()
    model.more = nn.ModuleDict({"a": Block(), "b": nn.ModuleList([Block()])})
    assert names_of(["head"], model)[3:] == ["more.a", "more.b.0"]


def test_a_shared_module_is_one_layer() -> None:
    model = Model()
    model.again = model.head
    model.decoder.layers.append(model.decoder.layers[0])
    names = names_of(["decoder.layers.1"], model)
    assert "again" not in names
    assert "decoder.layers.3" not in names


def test_a_container_in_which_a_cut_is_shared_is_no_layer() -> None:
    model = Model()
    model.decoder.shared = model.embed
    assert "decoder" not in names_of(["embed"], model)


# Homes


def test_partitions_begin_at_their_cuts_in_the_order_of_calls() -> None:
    cuts = ["decoder.layers.1", "decoder.norm"]
    assert homes(layers_of(Model(), cuts), cuts, ORDER) == {
        "embed": 0, "decoder.layers.0": 0, "decoder.layers.1": 1, "decoder.layers.2": 1,
        "decoder.norm": 2, "decoder.rotary": 0, "head": 2,
    }  # fmt: skip


def test_a_layer_without_an_order_lives_with_the_last_cut_before_it() -> None:
    cuts = ["decoder.layers.1", "decoder.norm"]
    assert homes(layers_of(Model(), cuts), cuts) == {
        "embed": 0, "decoder.layers.0": 0, "decoder.layers.1": 1, "decoder.layers.2": 1,
        "decoder.norm": 2, "decoder.rotary": 2, "head": 2,
    }  # fmt: skip


def test_cuts_without_an_order_may_be_called_in_another_than_they_are_registered() -> None:
    model = nn.ModuleDict({name: Block() for name in "abcd"})
    assert homes(layers_of(model, "db"), list("db")) == {"a": 0, "b": 2, "c": 2, "d": 1}


def test_a_layer_that_is_not_called_lives_with_the_one_before_it() -> None:
    cuts = ["b", "d"]
    layers = layers_of(nn.ModuleDict({name: Block() for name in "abcde"}), cuts)
    assert homes(layers, cuts, ["a", "b", "d", "e"])["c"] == 1
    assert homes(layers, cuts, ["c", "b", "d"]) == {"a": 1, "b": 1, "c": 0, "d": 2, "e": 2}


def test_cuts_in_another_order_than_they_are_called_are_refused() -> None:
    cuts = ["decoder.norm", "decoder.layers.1"]
    with pytest.raises(ValueError, match=r"which is \['decoder.layers.1', 'decoder.norm'\]"):
        homes(layers_of(Model(), cuts), cuts, ORDER)


def test_a_cut_that_is_not_called_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the cuts \['head'\] were not called"):
        homes(layers_of(Model(), ["head"]), ["head"], ORDER[:-1])


# What belongs to no layer


def outside(cuts: list[str]) -> dict[str, int]:
    model = Model()
    layers = layers_of(model, cuts)
    return homes_outside_of_layers(model, layers, cuts, homes(layers, cuts, ORDER))


def test_the_models_own_parameters_live_in_partition_0() -> None:
    assert outside(["head"]) == {"offset": 0, "mask": 0}


@pytest.mark.parametrize(
    ("cuts", "home"),
    [
        (["decoder.layers.1"], 0),
        (["decoder.rotary"], 0),  # its container is called before it
        (["decoder.layers.1", "head"], 0),
    ],
)
def test_a_containers_own_parameters_live_where_it_is_called(
    cuts: list[str], home: int
) -> None:
    assert outside(cuts)["decoder.scale"] == home


def test_a_later_containers_own_parameters_live_in_a_later_partition() -> None:
    model = nn.Module()
    model.first, model.second = Decoder(), Decoder()
    model.second.prompts = nn.ParameterList([torch.ones(1)])
    order = [f"{part}.{name}" for part in ("first", "second") for name in
             ("rotary", "layers.0", "layers.1", "layers.2", "norm")]  # fmt: skip
    inside = ["first.layers.1", "first.norm", "second.layers.2"]
    border = ["first.layers.1", "second.rotary", "second.norm"]
    for cuts, home in ((inside, 2), (border, 1)):
        layers = layers_of(model, cuts)
        found = homes_outside_of_layers(model, layers, cuts, homes(layers, cuts, order))
        assert found == {"first.scale": 0, "second.scale": home, "second.prompts.0": home}


@pytest.mark.parametrize(
    "cuts", [[], ["head"], ["decoder.layers.1"], ["decoder.rotary", "decoder.norm"]]
)
def test_every_parameter_and_buffer_is_a_layers_or_has_a_home_of_its_own(cuts: list[str]) -> None:
    model = Model()
    model.decoder.again = model.embed
    layers = layers_of(model, cuts)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    found = homes_outside_of_layers(model, layers, cuts, homes(layers, cuts))
    own = {id(tensors[name]) for name in found}
    inside = {id(t) for layer in layers.values() for t in (*layer.parameters(), *layer.buffers())}
    assert not own & inside
    assert own | inside == set(map(id, tensors.values()))
