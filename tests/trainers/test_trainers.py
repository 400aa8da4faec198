"""``Trainer`` trains many kinds of models in a pipe as plain ones, with the mixin and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import pipert

transformers = pytest.importorskip("transformers", reason="its Trainer is derived from")
pytest.importorskip("accelerate", reason="Trainer needs it")
peft = pytest.importorskip("peft", reason="adapters are tested as well")

from pipert.transformers import Pipelined  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "pad_token_id": 0,
}  # fmt: skip
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5: dict[str, Any] = {
    "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MIXTRAL = {
    **SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True,
    "router_aux_loss_coef": 0.5, "experts_implementation": "eager",
}  # fmt: skip
WAV2VEC: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
    "feat_proj_dropout": 0.0, "feat_quantizer_dropout": 0.0, "final_dropout": 0.0,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "ctc_loss_reduction": "sum",
    "pad_token_id": 0,
}  # fmt: skip
SEGFORMER: dict[str, Any] = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2], "decoder_hidden_size": 8, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0,
    "num_labels": 5,
}  # fmt: skip


def text(generator: torch.Generator, k: int) -> dict[str, Tensor]:
    """Padded: a row has from two to twelve tokens."""
    mask = torch.arange(12) < 2 + 3 * k % 11
    ids = torch.randint(1, 32, (12,), generator=generator).masked_fill(~mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long()}


def with_labels(generator: torch.Generator, k: int) -> dict[str, Tensor]:
    row = text(generator, k)
    return {**row, "labels": row["input_ids"].masked_fill(row["input_ids"] == 0, -100)}


def with_two_classes(generator: torch.Generator, k: int) -> dict[str, Tensor]:
    row = with_labels(generator, k)
    return {**row, "labels": row["labels"].clamp(max=1)}


def with_an_answer(generator: torch.Generator, k: int) -> dict[str, Tensor]:
    """Some answers lie beyond the text, and do not count."""
    start, end = torch.tensor(k % 14), torch.tensor(k % 14 + 1)
    return {**text(generator, k), "start_positions": start, "end_positions": end}


def sound(generator: torch.Generator, k: int) -> dict[str, Tensor]:
    labels = torch.randint(1, 12, (6,), generator=generator)
    labels = labels.masked_fill(torch.arange(6) >= 1 + k % 6, -100)
    return {"input_values": torch.randn(400, generator=generator), "labels": labels}


def picture(generator: torch.Generator, k: int) -> dict[str, Tensor]:
    """More pixels count with each row."""
    labels = torch.randint(0, 5, (16, 16), generator=generator)
    labels[:, 1 + 5 * k % 16 :] = 255
    return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": labels}


Row = Callable[[torch.Generator, int], dict[str, Tensor]]


@dataclass
class Case:
    model: str
    config: dict[str, Any]
    cuts: list[str]
    row: Row
    args: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-6
    trainer: str = ""

    def build(self) -> Any:
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        model = kind(kind.config_class(**self.config))
        return model if "bf16" in self.args else model.double()

    def rows(self, count: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        made = [self.row(generator, k) for k in range(count)]
        return [
            {name: x.double() if x.is_floating_point() else x for name, x in row.items()}
            for row in made
        ]


LLAMA_CUTS = ["model.layers.1"]
CASES = {
    "translation": Case(
        "T5ForConditionalGeneration", T5, ["encoder.block.1", "decoder.block.0"], with_labels,
        {"predict_with_generate": True, "generation_max_length": 6}, trainer="Seq2Seq",
    ),
    "a sum of CTC losses": Case(
        "Wav2Vec2ForCTC", WAV2VEC, ["wav2vec2.encoder.layers.1"], sound
    ),
    "segmentation": Case(
        "SegformerForSemanticSegmentation", SEGFORMER, ["segformer.stages.1.blocks.0"], picture
    ),
    "question answering": Case(
        "BertForQuestionAnswering", BERT, ["bert.encoder.layer.1"], with_an_answer
    ),
    "token classification": Case(
        "BertForTokenClassification", BERT, ["bert.encoder.layer.1"], with_two_classes
    ),
    "experts": Case("MixtralForCausalLM", MIXTRAL, LLAMA_CUTS, with_labels),
    "bf16": Case(
        "LlamaForCausalLM", SIZES, LLAMA_CUTS, with_labels, {"bf16": True}, rtol=1e-2
    ),
}  # fmt: skip


def norm_of(predicted: Any) -> dict[str, float]:
    """A metric of all that is predicted."""
    arrays = tree_leaves(predicted.predictions)
    return {"norm": float(sum([abs(array).sum() for array in arrays]))}


def make_trainer(case: Case, model: Any, folder: Path, mixin: bool, **more: Any) -> Any:
    arguments = getattr(transformers, f"{case.trainer}TrainingArguments")
    args = arguments(
        str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=3, max_steps=STEPS,
        learning_rate=0.1, optim="sgd", logging_steps=1, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", **{"seed": 3, **case.args, **more},
    )  # fmt: skip
    base = getattr(transformers, f"{case.trainer}Trainer")
    kind = type("PipelinedTrainer", (Pipelined, base), {}) if mixin else base
    return kind(
        model, args, train_dataset=case.rows(32), eval_dataset=case.rows(7),
        compute_metrics=norm_of,
    )  # fmt: skip


def train(case: Case, folder: Path, piped: bool, mixin: bool, **more: Any) -> dict[str, Any]:
    """Return losses, norms of gradients, what an evaluation finds, parameters, and a setting."""
    model = case.build()
    pipe = None
    if piped:
        devices = ["cpu"] * (len(case.cuts) + 1)
        pipe = pipert.pipeline(model, case.cuts, devices=devices, chunks=2)
    trainer = make_trainer(case, model, folder, mixin, **more)
    trainer.train()
    found = trainer.evaluate()
    if pipe is not None:
        assert pipe.statistics().runs
        pipe.close()
        if mixin:  # else each layer would be recomputed twice
            assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in history],
        "norms": [entry["grad_norm"] for entry in history],
        "evaluated": [found["eval_loss"], found["eval_norm"]],
        "parameters": dict(trainer.model.named_parameters()),
        "checkpoint": getattr(pipe, "checkpoint", None),
    }


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_training_and_evaluation_are_those_of_the_plain_trainer(
    name: str, accumulate: int, tmp_path: Path
) -> None:
    case, more = CASES[name], {"gradient_accumulation_steps": accumulate}
    expected = train(case, tmp_path, piped=False, mixin=False, **more)
    assert len(expected["losses"]) == STEPS
    for mixin in (True, False):
        found = train(case, tmp_path, piped=True, mixin=mixin, **more)
        for what in ("losses", "norms", "evaluated"):
            rtol = max(case.rtol, 1e-4)  # losses are rounded in the log
            assert found[what] == pytest.approx(expected[what], rel=rtol), (what, mixin)
        torch.testing.assert_close(
            found["parameters"], expected["parameters"], rtol=case.rtol, atol=case.rtol / 10
        )


def test_dropout_in_adapters_is_the_same_from_one_seed_when_it_is_recomputed(
    tmp_path: Path,
) -> None:
    """It differs from the plain model's: each micro-batch draws numbers of its own."""
    base = CASES["bf16"]

    @dataclass
    class Adapted(Case):
        def build(self) -> Any:
            config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear")
            return peft.get_peft_model(super().build(), config)

    case = Adapted(base.model, base.config, ["base_model.model.model.layers.1"], base.row)

    def losses(**more: Any) -> Any:
        more["gradient_accumulation_steps"] = 4
        return train(case, tmp_path, piped=True, mixin=True, **more)

    always = {"gradient_checkpointing": True}
    once, again, never = losses(**always), losses(**always), losses()
    other = losses(**always, seed=4)
    assert once["checkpoint"] == "always" != never["checkpoint"]
    assert once["losses"] == again["losses"] == never["losses"] != other["losses"]
    torch.testing.assert_close(once["parameters"], again["parameters"], rtol=0, atol=0)
    torch.testing.assert_close(once["parameters"], never["parameters"])
