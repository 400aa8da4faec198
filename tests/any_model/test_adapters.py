"""Tests adapters of peft: gradients of each kind, and adapters that change in a pipe."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import never_recompute, pipeline
from tests.any_model.family import library
from tests.any_model.same import assert_same
from tests.helpers.ways import grads_of

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "Lora": {"r": 2, "target_modules": ["q_proj", "down_proj"]},
    "Lora with DoRA": {"r": 2, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "Vera": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "IA3": {},
    "PromptTuning": {"num_virtual_tokens": 3},
    "PromptEncoder": {"num_virtual_tokens": 3, "encoder_hidden_size": 16},
    "PrefixTuning": {"num_virtual_tokens": 3},
}


class Times(nn.Module):
    """A layer whose parameter is not that of a Linear, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_lora_on_parameters_is_refused_where_it_is_recomputed_and_right_where_it_is_exempt(
    schedule: str | None,
) -> None:
    peft = library("peft")
    torch.manual_seed(1)
    options = {"target_modules": [], "target_parameters": ["0.weight", "1.weight"]}
    layers = nn.Sequential(Times(), Times(), nn.Linear(4, 4))
    plain: Any = drawn(peft.get_peft_model(layers, peft.LoraConfig(r=2, **options))).double()
    model = copy.deepcopy(plain)
    x = torch.randn(4, 4, dtype=torch.float64)
    plain(x).sum().backward()

    def go_back() -> None:
        if schedule is None:
            pipe(x).sum().backward()
        else:
            pipe.forward_backward(
                x, loss_fn=lambda y, _: y.sum(), reduction="sum", schedule=schedule
            )

    cuts, cpus = ["base_model.model.1"], ["cpu", "cpu"]
    with pipeline(model, cuts, devices=cpus, chunks=2, checkpoint="always") as pipe:
        with pytest.raises(RuntimeError, match="never_recompute .*peft's target_parameters"):
            go_back()
        pipe.zero_grad()
        for k in "01":
            never_recompute(model.get_submodule(f"base_model.model.{k}"))
        go_back()
    assert_same(grads_of(model), grads_of(plain))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # peft calls what transformers will rename
        warnings.simplefilter("ignore")
        yield


def config(kind: str) -> Any:
    made = getattr(library("peft"), kind.split()[0] + "Config")
    return made(task_type="CAUSAL_LM", **OPTIONS[kind])


def a_model(kind: str | None = None) -> Any:
    transformers = library("transformers")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if kind is not None:
        model = library("peft").get_peft_model(model, config(kind))
    return drawn(model.train().double())


def drawn(model: nn.Module) -> nn.Module:
    """Draws adapters, some of which begin as zeros."""
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=draws).to(parameter) * 0.1)
    return model


def batches(device: str = "cpu") -> list[dict[str, Any]]:
    ids = torch.randint(1, 64, (4, 6), generator=torch.Generator().manual_seed(3)).to(device)
    return [{"input_ids": part, "labels": part} for part in (ids[:3], ids[3:])]


def cuts_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith("layers.1")]


def expected_of(model: nn.Module, given: list[dict[str, Any]]) -> Any:
    plain: Any = copy.deepcopy(model)
    for batch in given:
        (plain(**batch).loss / len(given)).backward()
    return grads_of(plain)


def in_calls(pipe: Any, given: list[dict[str, Any]]) -> None:
    for batch in given:
        (pipe.module(**batch).loss / len(given)).backward()


def in_a_step(pipe: Any, given: list[dict[str, Any]]) -> None:
    pipe.forward_backward(step=lambda batch: pipe.module(**batch).loss, microbatches=given)


def assert_equals_the_plain_model(pipe: Any, expected: Any, device: str = "cpu") -> None:
    for way in (in_calls, in_a_step):
        pipe.module.zero_grad()
        way(pipe, batches(device))
        found = {name: None if g is None else g.cpu() for name, g in grads_of(pipe.module).items()}
        assert any(g is not None for g in found.values())
        assert_same(found, expected)


@pytest.mark.parametrize("kind", sorted({*OPTIONS} - {"PrefixTuning"}))
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_of_adapters_are_the_plain_models(kind: str, checkpoint: str) -> None:
    model = a_model(kind)
    expected = expected_of(model, batches())
    with pipeline(model, cuts_of(model), devices=["cpu"] * 2, checkpoint=checkpoint) as pipe:
        assert_equals_the_plain_model(pipe, expected)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["Vera", "Lora with DoRA"])
def test_gradients_of_adapters_on_two_gpus_are_the_plain_models(kind: str) -> None:
    model = a_model(kind)
    expected = expected_of(model, batches())
    with pipeline(model, cuts_of(model), devices=["cuda:0", "cuda:1"], checkpoint="always") as pipe:
        assert_equals_the_plain_model(pipe, expected, "cuda:0")


def _added(model: Any) -> None:
    torch.manual_seed(4)
    model.add_adapter("other", config("Lora"))
    model.set_adapter("other")
    drawn(model.double())


def _merged(model: Any) -> None:
    model.merge_adapter()
    model.base_model.model.lm_head.requires_grad_()


CHANGES: list[Callable[[Any], Any]] = [_added, _merged]


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_is_added_and_switched_or_merged_in_a_pipe(change: Any) -> None:
    model, other = a_model("Lora"), a_model("Lora")
    change(other)
    expected = expected_of(other, batches())
    with pipeline(model, cuts_of(model), devices=["cpu"] * 2) as pipe:
        in_a_step(pipe, batches())
        change(model)
        assert_equals_the_plain_model(pipe, expected)


def test_each_row_has_the_adapter_that_a_list_names() -> None:
    model = a_model("Lora").eval()
    _added(model)
    names = ["default", "other", "__base__", "default"]
    ids = torch.cat([batch["input_ids"] for batch in batches()])
    expected = model.eval()(input_ids=ids, adapter_names=names).logits
    with pipeline(model, cuts_of(model), devices=["cpu"] * 2, chunks=2):
        torch.testing.assert_close(model(input_ids=ids, adapter_names=names).logits, expected)


def test_a_step_refuses_prefixes_which_are_in_a_cache() -> None:
    model = a_model("PrefixTuning")
    expected = expected_of(model, batches())
    with pipeline(model, cuts_of(model), devices=["cpu"] * 2, checkpoint="never") as pipe:
        in_calls(pipe, batches())
        assert_same(grads_of(model), expected)
        with pytest.raises(RuntimeError, match="in an object or a closure"):
            in_a_step(pipe, batches())
