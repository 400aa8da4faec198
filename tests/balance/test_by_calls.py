"""Tests where a model is cut to make its slowest partition as fast as possible."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipert.balance import by_calls, measure
from pipert.balance.by_calls import choose_cuts
from pipert.balance.calls import measure_calls
from pipert.model.calls import order_of_calls
from pipert.model.cuts import check_cuts, homes, layers_of
from tests.helpers.virtual_clock import CLOCK, spend

X = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "perf_counter", CLOCK)


class Takes(nn.Module):
    """A layer that takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return spend(x * self.weight, self.seconds / 4, self.seconds * 3 / 4)


def takes(*seconds: float) -> list[Takes]:
    return [Takes(s) for s in seconds]


class Stack(nn.Module):
    """A list of layers with something before and after; what comes before is registered last."""

    def __init__(self, layers: Sequence[nn.Module], first: float = 0, last: float = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.unused = Takes(1000)
        self.last = Takes(last)
        self.first = Takes(first)
        self.table = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(self.table(x))
        y: Tensor = self.last(x)
        return y


def chosen(model: nn.Module, n: int, example: Any = X, **options: Any) -> list[str]:
    options = {"timeout": 0, "device": "cpu", **options}
    cuts = choose_cuts(model, n, example, **options)
    layers = layers_of(model, check_cuts(model, cuts))
    assert len(set(homes(layers, cuts, order_of_calls(model, example, layers)).values())) == n
    return cuts


# What is chosen


def test_the_cuts_are_the_best_for_the_times() -> None:
    assert chosen(Stack(takes(1, 1, 1, 5, 2, 2, 1)), 3) == ["layers.3", "layers.4"]


def test_layers_around_a_list_count_and_may_be_cut_off() -> None:
    layers = takes(1, 1, 1, 1)
    assert chosen(Stack(layers, first=4), 2) == ["layers.0"]
    assert chosen(Stack(layers, last=4), 2) == ["last"]
    assert chosen(Stack(layers, first=2, last=2), 2) == ["layers.2"]


class Group(nn.Module):
    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(takes(*seconds))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_a_closure(group: nn.Module, x: Tensor) -> Any:
    return checkpoint(lambda x: group(x), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("call", "cut"),
    [
        (lambda group, x: group(x), "layers.1.blocks.1"),
        (partial(checkpoint, use_reentrant=False), "layers.1"),
        (in_a_closure, "layers.1"),
    ],
    ids=["plain", "checkpointed", "in a closure"],
)
def test_no_cut_is_in_the_middle_of_a_function_that_is_checkpointed(call: Any, cut: str) -> None:
    """A backward would repeat it over two partitions."""

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = call(layer, x)
            y: Tensor = self.last(x)
            return y

    model = Model([Group(2, 0), Group(4, 4), Group(0, 1)])
    found = choose_cuts(model, 2, X, timeout=0, device="cpu")
    assert found[0].removesuffix(".blocks.0") == cut


def test_one_partition_has_no_cuts_and_takes_no_time() -> None:
    model = Stack(takes(1, 1))
    calls: list[nn.Module] = []
    model.register_forward_pre_hook(lambda *_: calls.append(model))
    assert choose_cuts(model, 1, X) == []
    assert calls == []


def test_rounds_go_on_until_the_time_is_over_and_their_median_counts() -> None:
    slow = iter([0.0, 0, 0, 100, 0, 0, 0])
    rounds: list[float] = []

    class Disturbed(Takes):
        def forward(self, x: Tensor) -> Tensor:
            rounds.append(next(slow, 0.0))
            return spend(super().forward(x), rounds[-1], 0)

    model = Stack([*takes(1, 1), Disturbed(1), *takes(1)])
    # One to warm up, one to look at how fine the cuts are, then of 2.5 s, 102.5 s and 2.5 s.
    assert choose_cuts(model, 2, X, timeout=106, device="cpu") == ["layers.2"]
    assert rounds == [0, 0, 0, 100, 0]


# Candidates


def test_an_encoder_and_a_decoder_are_cut_as_one() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Stack(takes(1, 1))
            self.encoder = Stack(takes(1, 1, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.decoder(self.encoder(x))
            return y

    assert chosen(Both(), 3) == ["encoder.layers.2", "decoder.layers.0"]


def test_candidates_without_lists_are_the_children_of_sequentials() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Takes(1)
            self.stage1 = nn.Sequential(*takes(1, 1))
            self.stage2 = nn.Sequential(*takes(1, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.stage2(self.stage1(self.stem(x)))
            return y

    assert chosen(Stages(), 2) == ["stage2.0"]
    assert chosen(Stages(), 3) == ["stage1.1", "stage2.1"]
    assert chosen(nn.Sequential(*takes(1, 2, 3)), 2) == ["2"]


class Block(nn.Module):
    """A block of two parts without a list."""

    def __init__(self, seconds: float = 1) -> None:
        super().__init__()
        self.attention, self.out = takes(seconds / 2, seconds / 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.attention(x))
        return y


def test_an_element_is_cut_inside_only_if_it_takes_more_than_its_share() -> None:
    assert chosen(Stack([Block(), *takes(1, 1)]), 2)[0] in ("layers.1", "layers.2")
    assert chosen(Stack([*takes(2), Block(5), *takes(1)]), 2) == ["layers.1.out"]


def test_a_block_is_not_cut_inside_though_it_takes_more_than_its_share() -> None:
    assert chosen(Stack([Block(2), Block(5), Block(1)]), 2) == ["layers.1"]
    assert chosen(Stack([Block(2), Block(2)], 1, 1), 4) == ["layers.0", "layers.1", "last"]


def test_a_stage_is_cut_between_its_blocks() -> None:
    stages = [Stack([Block(), Block()]), Stack([Block() for _ in range(6)])]
    assert chosen(Stack(stages), 2) == ["layers.1.layers.2"]
    plain = [nn.Sequential(Block(), Block()), nn.Sequential(*[Block() for _ in range(6)])]
    assert chosen(Stack(plain), 2) == ["layers.1.2"]


def test_a_list_of_layers_that_get_the_same_input_is_no_place_to_cut() -> None:
    class Experts(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([layer(x) for layer in self.layers]).sum(0)

    blocks = [Experts(takes(1, 1, 1)), Experts(takes(1, 1, 1)), Experts(takes(2, 2, 2))]
    assert chosen(Stack(blocks), 2) == ["layers.2"]
    assert chosen(Stack([*takes(1), blocks[2], *takes(1)]), 2)[0] in ("layers.1", "layers.2")


def test_lists_inside_elements_are_cut_only_if_an_element_takes_more_than_its_share() -> None:
    experts = [Stack(takes(0.25, 0.25, 0.25, 0.25)) for _ in range(4)]
    assert chosen(Stack(experts), 2) == ["layers.2"]
    assert chosen(Stack([Stack(takes(1, 1, 1, 1)), *takes(1, 1)]), 2) == ["layers.0.layers.3"]


def test_a_module_that_is_never_called_is_no_candidate() -> None:
    class TakesParameters(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.out = Takes(seconds)

        def forward(self, x: Tensor) -> Tensor:
            return spend(x * self.out.weight, self.out.seconds, 0)

    model = Stack([TakesParameters(1), TakesParameters(6), *takes(1, 1)])
    assert chosen(model, 2) == ["layers.2"]
    assert chosen(model, 3) == ["layers.1", "layers.2"]


def test_a_compiled_layer_is_not_cut_inside() -> None:
    model = Stack([Stack(takes(1, 1, 1, 1)), *takes(1)])
    model.layers[0]._compiled_call_impl = model.layers[0]._call_impl
    assert chosen(model, 2) == ["layers.1"]


# What is refused


def test_more_partitions_than_candidates_are_refused_with_their_number() -> None:
    told = r"at most 2, got 3: the example calls .*\['first', 'last'\]; use fewer"
    with pytest.raises(ValueError, match=told):
        choose_cuts(Stack([]), 3, X, device="cpu")


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"partitions": 0}, ValueError, "partitions must be 1 or more, got 0"),
        ({"timeout": -1}, ValueError, "timeout must be a number of seconds, 0 or more, got -1"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        choose_cuts(**{"model": Stack([]), "partitions": 2, "example": X, **options})


# On a GPU


@pytest.mark.cuda
def test_a_model_on_the_cpu_is_measured_on_the_first_gpu() -> None:
    seen = set()

    class Looks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x * self.last.weight)
            seen.add((x.device, y.device))
            return y

    assert choose_cuts(Looks(takes(1, 3, 2, 1, 1)), 2, X, timeout=0) == ["layers.2"]
    assert seen == {(torch.device("cuda", 0), torch.device("cuda", 0))}


# Models of transformers


TEXT = torch.arange(16).view(2, 8)
FAMILIES: dict[str, tuple[dict[str, Any], Any]] = {
    "Llama": (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 2, "num_key_value_heads": 1},
        {"input_ids": TEXT, "labels": TEXT},
    ),
    "Mixtral": (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2,
         "output_router_logits": True},
        {"input_ids": TEXT, "labels": TEXT},
    ),
    "T5": (
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2,
         "decoder_start_token_id": 0, "pad_token_id": 0},
        {"input_ids": TEXT, "labels": TEXT},
    ),
}  # fmt: skip
HEADS = {"T5": "ForConditionalGeneration"}


def made(family: str) -> tuple[Any, Any]:
    """Makes a tiny model of transformers and an example."""
    transformers = pytest.importorskip("transformers")
    options, example = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, bos_token_id=1, eos_token_id=2, **options
    )
    return getattr(transformers, family + HEADS.get(family, "ForCausalLM"))(config), example


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_are_cut(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # by the real clock
    model, example = made(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(chosen(model, 3, example)) == 2
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_candidates_are_the_modules_in_the_plan_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, example = made("Llama")
    blocks: list[str] = []

    def measure(*args: Any, **options: Any) -> Any:
        found = measure_calls(*args, **options)
        blocks[:] = found
        return found

    monkeypatch.setattr(by_calls, "measure_calls", measure)
    assert len(chosen(model, 2, example)) == 1
    assert {re.sub(r"\.\d+", "", name) for name in blocks} == set(model._pp_plan)


class Dropping(Stack):
    """Drops layers at random, as LayerDrop does, by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_drops_layers_drops_the_same_ones_in_each_forward(seed: int) -> None:
    random.seed(seed)
    before = random.getstate()
    assert len(chosen(Dropping(takes(*[1] * 12)), 2)) == 1
    assert random.getstate() == before
