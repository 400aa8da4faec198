"""Calls in place of models of transformers: labels, default caches, and arguments without rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert

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
def test_a_call_with_labels_is_split_and_has_the_plain_loss(more: dict[str, Any]) -> None:
    plain, model = llama(), llama()
    batch = {"input_ids": IDS, "labels": LABELS, **more}
    expected = plain(**batch).loss
    expected.backward()
    seen = count_rows(model)
    with in_pipe(model, checkpoint="never"):
        found = model(**batch).loss
        found.backward()
    assert seen == [2, 1, 1]
    torch.testing.assert_close(found, expected)
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad)


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("adds", ["prompt", "own"])
def test_labels_are_not_counted_for_a_model_that_may_add_others(adds: str) -> None:
    model = llama()
    if adds == "prompt":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        ).double()
    else:
        class Own(type(model)):  # type: ignore[misc]
            def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
                return super().forward(*args, labels=labels % 7, **kwargs)

        model.__class__ = Own
    expected = copy.deepcopy(model)(input_ids=IDS, labels=IDS).loss
    cut = "base_model.model.layers.1" if adds == "prompt" else "model.layers.1"
    with (
        pipert.pipeline(model, [cut], devices=["cpu"] * 2, chunks=2),
        pytest.warns(UserWarning, match="one micro-batch"),
    ):
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, expected)


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


def test_a_causal_mask_is_whole_and_one_of_words_is_split() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(6, 6, 4)
    causal = torch.full((6, 6), -torch.inf).triu(1)
    for mask in (causal, torch.rand(6, 6) < 0.5):
        expected = copy.deepcopy(model)(x, mask)
        with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=3):
            torch.testing.assert_close(model(x, mask), expected)
