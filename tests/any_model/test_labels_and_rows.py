"""Calls in place of models of transformers: labels, default caches, and arguments without rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.helpers.ways import grads_of

transformers = pytest.importorskip("transformers", reason="its losses and names are tested")
pytestmark = pytest.mark.slow

IDS = torch.randint(4, 60, (4, 6), generator=torch.Generator().manual_seed(7))
LABELS = IDS.masked_fill(torch.arange(6) > torch.tensor([[0], [3], [5], [2]]), -100)
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "initializer_range": 0.3,
}  # fmt: skip


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "use_cache": False, **more})
    return transformers.LlamaForCausalLM(config).double()


def in_pipe(model: Any, **more: Any) -> Any:
    given = {"devices": ["cpu"] * 2, "chunks": 3, **more}
    return pipert.pipeline(model, ["model.layers.1"], **given)


def count_rows(model: Any) -> list[int]:
    """Returns a list that will hold the number of rows of each micro-batch."""
    seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, args, y: seen.append(len(args[0])))
    return seen


MORE: list[dict[str, Any]] = [
    {}, {"shift_labels": LABELS.roll(-1, 1)}, {"labels": IDS, "ignore_index": int(IDS[1, 2])},
]  # fmt: skip


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("how", ["model", "pipe"])
def test_a_call_with_labels_is_split_and_has_the_plain_loss(
    how: str, more: dict[str, Any]
) -> None:
    plain, model = llama(), llama()
    batch = {"input_ids": IDS, "labels": LABELS, **more}
    expected = plain(**batch).loss
    expected.backward()
    seen = count_rows(model)
    with in_pipe(model, checkpoint="never") as pipe:
        found = (model if how == "model" else pipe)(**batch).loss
        found.backward()
    assert seen == [2, 1, 1]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads_of(model), grads_of(plain))


def test_a_call_of_the_pipe_has_a_default_cache_and_whole_arguments_as_one_of_the_model() -> None:
    model = llama(use_cache=True)
    with in_pipe(model) as pipe, torch.no_grad():
        found, expected = pipe(input_ids=IDS), model(input_ids=IDS)
        assert found.past_key_values.get_seq_length() == IDS.size(1)
        torch.testing.assert_close(found.logits, expected.logits)
        positions = torch.arange(IDS.size(1))[None]
        found = pipe(IDS, position_ids=positions, use_cache=False)
        torch.testing.assert_close(found.logits, expected.logits)


def test_an_unknown_loss_is_one_micro_batch_and_said_once() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, num_labels=3, use_cache=False)
    model = transformers.LlamaForSequenceClassification(config)
    expected = copy.deepcopy(model)(input_ids=IDS, labels=IDS[:, 0] % 3).loss
    with in_pipe(model) as pipe, pipe.record() as timeline:
        with pytest.warns(UserWarning, match=r"one micro-batch of 3 asked for.*step="):
            found = model(input_ids=IDS, labels=IDS[:, 0] % 3).loss
        torch.testing.assert_close(found, expected)
        model(input_ids=IDS, labels=IDS[:, 0] % 3)
        with torch.no_grad():
            model(input_ids=IDS, labels=IDS[:, 0] % 3)
    assert "* one micro-batch of 3 asked for, because what its loss" in str(timeline.report())


def adapted(config: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), getattr(peft, config.pop("config"))(**config)).double()


class Changes(nn.Module):
    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
        return super().forward(*args, labels=labels % 7, **kwargs)


class Adds(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 1.0
        return output


def of_own(mixin: type) -> Any:
    model = llama()
    model.__class__ = type(mixin.__name__, (mixin, type(model)), {})
    return model


def bart() -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24,
        dropout=0.0, is_decoder=True, is_encoder_decoder=False,
    )  # fmt: skip
    return transformers.BartForCausalLM(config).double()


PROMPT = {"config": "PromptTuningConfig", "task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
LORA = {"config": "LoraConfig", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
ADALORA = {
    "config": "AdaLoraConfig", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"],
    "init_r": 3, "target_r": 2, "total_step": 9,
}  # fmt: skip
CPT = {
    "config": "CPTConfig", "task_type": "CAUSAL_LM", "cpt_token_ids": [3, 4], "cpt_mask": [1, 1],
    "cpt_tokens_type_mask": [1, 4],
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[[], Any], str, tuple[int | None, ...]]] = {
    "adapter": (lambda: adapted(LORA.copy()), "base_model.model.model.layers.1", ()),
    "prompt": (lambda: adapted(PROMPT.copy()), "base_model.model.layers.1", (None,)),
    "changed labels": (lambda: of_own(Changes), "model.layers.1", (None, 20)),
    "mean": (bart, "model.decoder.layers.1", (None, 20)),
    "term": (lambda: of_own(Adds), "model.layers.1", (None, 20)),
    "term of a tuner": (
        lambda: adapted(ADALORA.copy()), "base_model.model.model.layers.1", (None, 20)
    ),
    "mean of a tuner": (lambda: adapted(CPT.copy()), "base_model.model.layers.1", (None, 20)),
}  # fmt: skip
"""Makes a model; its cut; and for which numbers of items its loss is no sum of losses."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("number", [None, 20])
@pytest.mark.parametrize("kind", OTHERS)
def test_losses_are_added_up_only_if_that_is_the_plain_loss(kind: str, number: Any) -> None:
    make, cut, in_one = OTHERS[kind]
    model, more = make(), {} if number is None else {"num_items_in_batch": torch.tensor(number)}
    if kind == "mean of a tuner":
        more["input_type_mask"] = torch.full_like(IDS, 4)
    expected = copy.deepcopy(model)(input_ids=IDS, labels=IDS, **copy.deepcopy(more)).loss
    with (
        pipert.pipeline(model, [cut], devices=["cpu"] * 2, chunks=2),
        pytest.warns(UserWarning, match="one micro-batch") if number in in_one else nullcontext(),
    ):
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS, **more).loss, expected)


def mean_of_labels(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_loss_function_that_is_assigned_later_is_compared_in_the_next_call() -> None:
    model = llama()
    with in_pipe(model) as pipe:
        for _ in range(4):  # the next calls would not look
            pipe.forward_backward(input_ids=IDS, labels=IDS)
        model.loss_function = mean_of_labels
        expected = mean_of_labels(pipe(input_ids=IDS).logits, IDS, 64)
        torch.testing.assert_close(pipe.forward_backward(input_ids=IDS, labels=IDS), expected)


PACKED = torch.cat([torch.arange(2), torch.arange(4)])


def test_a_packed_row_keeps_the_model_s_own_cache() -> None:
    plain, model = llama(use_cache=True), llama(use_cache=True)
    batch = {"input_ids": IDS[:1], "position_ids": PACKED[None], "labels": IDS[:1]}
    with in_pipe(model):
        torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("how", ["call", "step"])
def test_packed_rows_that_a_default_cache_mixes_are_refused_unless_it_is_off(how: str) -> None:
    plain, model = llama(use_cache=True), llama(use_cache=True)
    batch = {"input_ids": IDS, "position_ids": PACKED.expand(4, 6), "labels": IDS}
    with in_pipe(model) as pipe:
        with pytest.raises(ValueError, match="use_cache=False"):
            if how == "call":
                model(**batch)
            else:
                pipe.forward_backward(microbatches=[batch], step=lambda each: model(**each).loss)
        torch.testing.assert_close(
            model(**batch, use_cache=False).loss, plain(**batch, use_cache=False).loss
        )
        batch["position_ids"] = torch.arange(6).expand(4, 6)  # not packed
        torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)


WITHOUT_ROWS: dict[str, dict[str, Any]] = {
    "as many logits as rows": {"logits_to_keep": torch.tensor([0, 1, 3, 5])},
    "positions of one row": {"position_ids": torch.arange(6)[None]},
    "a mask of one row": {"attention_mask": torch.zeros(1, 1, 6, 6).double().masked_fill(
        torch.ones(6, 6).triu(1).bool(), -torch.inf)},
    "texts in other places": {"cu_seq_lens_q": torch.tensor([0, 2, 4, 6])},
}  # fmt: skip


@pytest.mark.parametrize("more", WITHOUT_ROWS.values(), ids=WITHOUT_ROWS)
def test_arguments_without_rows_are_whole(more: dict[str, Any]) -> None:
    plain, model = llama(), llama()
    seen = count_rows(model)
    with in_pipe(model):
        found = model(input_ids=IDS, **more).logits
    assert seen == [2, 1, 1]
    torch.testing.assert_close(found, plain(input_ids=IDS, **more).logits)


class Attention(nn.Module):
    """A model of someone's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        if mask.dtype == torch.bool:  # the words of each row
            y = x * mask[..., None]
        else:
            y = (x @ x.mT + mask).softmax(-1) @ x
        return self.second(y)  # type: ignore[no-any-return]


MASKS = ["mask", "src_mask", "tgt_mask", "attn_mask", "memory_mask"]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("how", ["model", "pipe", "step"])
def test_a_mask_that_may_have_a_row_for_each_row_or_each_time_is_refused(
    name: str, how: str
) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor, **masks: Tensor) -> Any:
            return self.attention(x, masks[name])

    torch.manual_seed(0)
    model = Masked()
    calls: dict[str, Callable[..., Any]] = {
        "model": model,
        "pipe": lambda *args, **kwargs: pipe(*args, **kwargs),
        "step": lambda *args, **kwargs: pipe.forward_backward(
            *args, **kwargs, loss_fn=lambda y, _: y.square().mean()
        ),
    }
    causal = torch.full((6, 6), -torch.inf).triu(1)
    for rows in (6, 4):
        x = torch.randn(rows, 6, 4)
        expected = copy.deepcopy(model)(x, **{name: causal})
        expected = expected.square().mean() if how == "step" else expected
        cuts = ["attention.second"]
        with pipert.pipeline(model, cuts, devices=["cpu"] * 2, chunks=3) as pipe:
            torch.testing.assert_close(calls[how](x, **{name: pipert.Replicate(causal)}), expected)
            if rows == 6:
                for mask in (causal, torch.ones(6, 6), torch.rand(6, 6) < 0.5):
                    with pytest.raises(ValueError, match=rf"{name} is .*Replicate"):
                        calls[how](x, **{name: mask})
            else:
                torch.testing.assert_close(calls[how](x, **{name: causal}), expected)


def test_a_mask_of_words_is_split() -> None:
    torch.manual_seed(0)
    model, x, mask = Attention(), torch.randn(6, 5, 4), torch.rand(6, 5) < 0.5
    expected = copy.deepcopy(model)(x, mask)
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=3):
        torch.testing.assert_close(model(x, mask), expected)
