"""What the mixin ``Pipelined`` makes of losses that are not the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipert

transformers = pytest.importorskip("transformers", reason="its Trainer is mixed into")
pytest.importorskip("accelerate", reason="Trainer needs it")

from pipert.transformers import Pipelined  # noqa: E402

pytestmark = pytest.mark.slow


def mean_loss(outputs: Any, inputs: Any) -> Any:
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class OwnMean(transformers.Trainer):  # type: ignore
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return mean_loss(model(input_ids=inputs["input_ids"]), inputs)


class PipelinedMean(Pipelined, OwnMean):
    pass


class PipelinedTrainer(Pipelined, transformers.Trainer):  # type: ignore
    pass


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trained(
    kind: Any, model: Any, folder: Path, rows: int = 16, change: Any = None, empty: Any = ()
) -> Any:
    ids = torch.randint(1, 32, (rows, 6), generator=torch.Generator().manual_seed(1))
    labels = [x * 0 - 100 if k // 4 in empty else x for k, x in enumerate(ids)]
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = kind(model, args, train_dataset=[
        {"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)
    ])  # fmt: skip
    if change is not None:
        change(trainer)
    trainer.train()
    history = trainer.state.log_history
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def in_pipe(kind: Any, model: Any, folder: Path, change: Any = None) -> Any:
    with pipert.pipeline(model, ["model.layers.1"], devices=["cpu"] * 2, chunks=4):
        return trained(kind, model, folder, change=change)


def test_a_mean_of_the_trainers_own_is_not_split(tmp_path: Path) -> None:
    expected = trained(OwnMean, build(), tmp_path)
    found = in_pipe(PipelinedMean, build(), tmp_path)
    assert found == [pytest.approx(pair, rel=1e-3) for pair in expected]


def test_a_mean_of_the_models_own_is_not_split(tmp_path: Path) -> None:
    def loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    models = [build(), build()]
    for model in models:
        model.loss_function = loss
    expected = trained(transformers.Trainer, models[0], tmp_path)
    found = in_pipe(PipelinedTrainer, models[1], tmp_path)
    assert found == [pytest.approx(pair, rel=1e-3) for pair in expected]


def test_a_loss_that_is_set_on_the_trainer_counts_in_each_step(tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        def compute_loss(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return 10 * mean_loss(model(input_ids=inputs["input_ids"]), inputs)

        trainer.compute_loss = compute_loss

    expected = trained(transformers.Trainer, build(), tmp_path, change=change)
    found = in_pipe(PipelinedTrainer, build(), tmp_path, change=change)
    assert found == [pytest.approx(pair, rel=1e-3) for pair in expected]


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1), (3,)])
def test_a_batch_without_labels_that_count_is_logged_as_by_the_plain_trainer(
    empty: tuple[int, ...], tmp_path: Path
) -> None:
    """BERT's loss of such a batch is not a number, in whose place an average is logged."""

    class InOrder(transformers.Trainer):  # type: ignore
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class PipelinedInOrder(Pipelined, InOrder):
        pass

    def bert() -> Any:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)

    model = bert()
    with pipert.pipeline(model, ["bert.encoder.layer.1"], devices=["cpu"] * 2, chunks=2):
        found = trained(PipelinedInOrder, model, tmp_path, empty=empty)
    expected = trained(InOrder, bert(), tmp_path, empty=empty)
    for (loss, norm), (plain_loss, plain_norm) in zip(found, expected, strict=True):
        assert (loss, norm) == pytest.approx((plain_loss, plain_norm), rel=1e-3)
