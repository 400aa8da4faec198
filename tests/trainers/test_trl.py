"""The trainers of ``trl`` train a model in a pipe as they train a plain one."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipert

trl = pytest.importorskip("trl", reason="its trainers are combined with the mixin")
datasets = pytest.importorskip("datasets", reason="trl needs it")
peft = pytest.importorskip("peft", reason="adapters are tested as well")
tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer is built with it")
transformers = pytest.importorskip("transformers", reason="its models are trained")

from pipert.transformers import Pipelined  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WORDS = "abcdefghijklmnop"
STEPS = 3
CPUS, GPUS = ["cpu", "cpu"], ["cuda:0", "cuda:1"]


@functools.cache
def tokenizer() -> Any:
    """One word is one letter."""
    names = ["<pad>", "</s>", "<unk>", *WORDS]
    model = tokenizers.models.WordLevel({w: k for k, w in enumerate(names)}, unk_token="<unk>")
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


@functools.cache
def data(kind: str) -> Any:
    """Texts of different lengths, whose batches are padded."""
    chance = random.Random(0)
    columns = {"text": (3, 9), "prompt": (2, 5), "chosen": (2, 5), "rejected": (2, 5)}
    names = {"texts": ["text"], "prompts": ["prompt"], "pairs": ["prompt", "chosen", "rejected"]}
    rows = [
        {name: " ".join(chance.choices(WORDS, k=chance.randint(*columns[name]))) + " "
         for name in names[kind]}
        for _ in range(32)
    ]  # fmt: skip
    return datasets.Dataset.from_list(rows)


def build(kind: str = "LlamaForCausalLM", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    return getattr(transformers, kind)(config).double()


def adapters() -> Any:
    return peft.LoraConfig(r=2, lora_dropout=0.0, target_modules="all-linear")


def different_tokens(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


@dataclass
class Case:
    """A trainer of trl, such as ``"SFT"``, and what it is given."""

    name: str
    data: str
    model: str = "LlamaForCausalLM"
    args: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    has_adapters: bool = False
    has_reference: bool = False


CASES = {
    "SFT": Case("SFT", "texts"),
    "SFT, packed": Case("SFT", "texts", args={"packing": True, "max_length": 16}),
    "SFT, adapters": Case("SFT", "texts", has_adapters=True),
    "SFT, recomputed": Case("SFT", "texts", args={"gradient_checkpointing": True}),
    "DPO": Case("DPO", "pairs", has_reference=True),
    "DPO, precomputed": Case(
        "DPO", "pairs", args={"precompute_ref_log_probs": True}, has_adapters=True
    ),
    "Reward": Case("Reward", "pairs", model="LlamaForSequenceClassification"),
    "GRPO": Case(
        "GRPO", "prompts", args={"num_generations": 2, "max_completion_length": 4},
        more={"reward_funcs": different_tokens},
    ),
    "GRPO, with a reference": Case(
        "GRPO", "prompts", more={"reward_funcs": different_tokens}, has_adapters=True,
        args={"num_generations": 2, "max_completion_length": 4, "beta": 0.1},
    ),
}  # fmt: skip


class Trained:
    """What came out of a training."""

    def __init__(self, trainer: Any, pipes: list[Any]) -> None:
        history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        self.losses = [entry["loss"] for entry in history]
        self.norms = [entry["grad_norm"] for entry in history]
        self.runs = [pipe.statistics().runs for pipe in pipes]
        self.state = trainer.model.state_dict()

    def assert_same(self, other: Trained) -> None:
        assert len(self.losses) == STEPS and any(self.norms)
        assert self.losses == pytest.approx(other.losses, rel=1e-4, abs=1e-6)
        assert self.norms == pytest.approx(other.norms, rel=1e-4)
        torch.testing.assert_close(self.state, other.state, check_device=False)


def make(
    case: Case, folder: Path, accumulate: int, devices: list[str] | None, mixin: bool = False
) -> tuple[Any, list[Any]]:
    """Make a trainer, of a model in a pipe if ``devices`` are given; return its pipes, too."""
    model, more = build(case.model), dict(case.more)
    if case.has_reference:
        more["ref_model"] = build(case.model, seed=1)
    if case.has_adapters:
        more["peft_config"] = adapters()
    in_pipe: list[nn.Module] = [model, *[more[k] for k in more if k == "ref_model"]]
    pipes = [
        pipert.pipeline(each, ["model.layers.2"], devices=devices, chunks=2)
        for each in in_pipe if devices
    ]  # fmt: skip
    on_cpu = devices != GPUS
    arguments = getattr(trl, f"{case.name}Config")(
        str(folder), max_steps=STEPS, bf16=False, report_to="none", save_strategy="no", seed=1,
        disable_tqdm=True, logging_steps=1, learning_rate=0.1, optim="sgd", use_cpu=on_cpu,
        per_device_train_batch_size=2, gradient_accumulation_steps=accumulate,
        dataloader_pin_memory=False, **{"gradient_checkpointing": False, **case.args},
    )  # fmt: skip
    base = getattr(trl, f"{case.name}Trainer")
    kind = type("PipelinedTrainer", (Pipelined, base), {}) if mixin else base
    trainer = kind(
        model, args=arguments, train_dataset=data(case.data), processing_class=tokenizer(), **more
    )
    return trainer, pipes


def train(*args: Any) -> Trained:
    trainer, pipes = make(*args)
    trainer.train()
    trained = Trained(trainer, pipes)
    for pipe in pipes:
        pipe.close()
    return trained


@functools.cache
def plainly(name: str, accumulate: int, folder: Path) -> Trained:
    """The plain trainer, once for all ways of the same case."""
    return train(CASES[name], folder, accumulate, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.mark.parametrize("mixin", [True, False], ids=["mixin", "plain trainer"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_model_in_a_pipe_is_trained_as_the_plain_one(
    name: str, accumulate: int, mixin: bool, folder: Path
) -> None:
    trained = train(CASES[name], folder, accumulate, CPUS, mixin)
    trained.assert_same(plainly(name, accumulate, folder))
    assert all(trained.runs)


def test_a_reference_without_adapters_is_refused_by_the_mixin(folder: Path) -> None:
    case = Case("DPO", "pairs", has_adapters=True)
    with pytest.raises(ValueError, match="set precompute_ref_log_probs=True, or use the trainer"):
        make(case, folder, 1, CPUS, True)


def test_a_reference_without_adapters_works_with_the_plain_trainer(folder: Path) -> None:
    case = Case("DPO", "pairs", has_adapters=True)
    train(case, folder, 2, CPUS).assert_same(train(case, folder, 2, None))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mixin", [True, False], ids=["mixin", "plain trainer"])
@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_a_model_on_gpus_is_trained_as_the_plain_one(name: str, mixin: bool, folder: Path) -> None:
    trained = train(CASES[name], folder, 2, GPUS, mixin)
    trained.assert_same(plainly(name, 2, folder))
    assert {str(weight.device) for weight in trained.state.values()} == set(GPUS)
