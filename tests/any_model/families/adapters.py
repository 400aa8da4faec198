"""Lists models that another library has changed: adapters on a frozen base, own checkpoints."""

from __future__ import annotations

import warnings

from tests.any_model.families.decoders import LLAMA, labelled
from tests.any_model.family import Family, Made, library, made, own_loss, tokens

__all__ = ["ADAPTED"]


def _adapted() -> Made:
    transformers, peft = library("transformers"), library("peft")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    lora = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    with warnings.catch_warnings():  # peft calls a function that transformers will rename
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.get_peft_model(llama, lora)
    return made(adapted, labelled())


def _checkpointing_itself() -> Made:
    transformers = library("transformers")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    llama.activation_checkpointing_enable()
    return made(llama, tokens())


ADAPTED: list[Family] = [
    Family(
        "llama with lora (peft)", _adapted,
        ("base_model.model.model.layers.1", "base_model.model.model.layers.3"),
        "peft", own_loss, notes="the base is frozen, its embedding, too",
    ),
    Family(
        "llama that checkpoints its layers", _checkpointing_itself,
        ("model.layers.1", "model.layers.3"), "transformers",
        never_drops="torch's checkpoint would draw others again, and is refused",
        notes="activation_checkpointing_enable(), which was gradient_checkpointing_enable()",
    ),
]  # fmt: skip
