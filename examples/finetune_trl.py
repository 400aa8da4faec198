"""Fine-tune a Llama with the trainers of ``trl``: SFT, then DPO, over several devices.

    python examples/finetune_trl.py                    # every GPU there is, else two CPU workers
    python examples/finetune_trl.py --devices cpu,cpu,cpu --layers 6 --steps 50

The trainers are trl's, with the mixin ``Pipelined``: the batches of a gradient accumulation are the
micro-batches of a step under 1F1B. The model is trained to write lines of Python's standard
library, and then to prefer them to the same lines with their words in reverse order. Nothing is
downloaded: the model is built from a configuration, so it is random, and a token is a byte.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import pipert
from pipert.transformers import Pipelined

LENGTHS = range(30, 80)  # lines of other lengths, in characters, are left out


class PipelinedSFT(Pipelined, SFTTrainer):  # type: ignore[misc]
    """Takes each step in the pipe."""


class PipelinedDPO(Pipelined, DPOTrainer):  # type: ignore[misc]
    """Takes each step in the pipe; the reference is in a pipe of its own."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer of bytes; in real use, ``from_pretrained`` loads the model's."""
    names = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: k for k, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"
    )


def build_model(options: argparse.Namespace, tokenizer: Any) -> LlamaForCausalLM:
    """Builds a random Llama; in real use, ``from_pretrained`` loads a trained one."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192,
        num_hidden_layers=options.layers, num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def put_in_pipe(model: nn.Module, options: argparse.Namespace) -> pipert.ModulePipe:
    """Puts a model in a pipe, in place, with as many layers on each device."""
    devices = options.devices.split(",")
    firsts = [k * options.layers // len(devices) for k in range(1, len(devices))]
    return pipert.pipeline(model, [f"model.layers.{k}" for k in firsts], devices=devices)


def read_lines() -> list[str]:
    """Reads lines of the standard library that have three words or more."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line.strip() for file in files for line in file.read_text("utf-8").splitlines()]
    return [line for line in lines if len(line) in LENGTHS and len(line.split()) > 2]


def settings(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Returns what both trainers are told."""
    return {
        "output_dir": folder, "max_steps": options.steps, "learning_rate": options.lr,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,  # micro-batches
        "logging_steps": max(1, options.steps // 5), "report_to": "none", "save_strategy": "no",
        "use_cpu": options.devices.startswith("cpu"), "bf16": False, "seed": options.seed,
        "dataloader_pin_memory": False, "disable_tqdm": True,
    }  # fmt: skip


def train_sft(model: Any, tokenizer: Any, options: argparse.Namespace, folder: str) -> list[float]:
    """Trains the model to write such lines; returns the losses that were logged."""
    data = Dataset.from_list([{"text": line} for line in read_lines()[:: options.every]])
    with put_in_pipe(model, options):
        trainer = PipelinedSFT(
            model,
            args=SFTConfig(**settings(options, folder)),
            train_dataset=data,
            processing_class=tokenizer,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_dpo(model: Any, tokenizer: Any, options: argparse.Namespace, folder: str) -> list[float]:
    """Trains it to prefer the end of a line to its reverse; returns the losses as well."""
    words = [line.split() for line in read_lines()[:: options.every]]
    pairs = [
        {"prompt": line[0], "chosen": " " + " ".join(line[1:]),
         "rejected": " " + " ".join(line[:0:-1])}
        for line in words
    ]  # fmt: skip
    reference = copy.deepcopy(model)
    with put_in_pipe(model, options), put_in_pipe(reference, options):
        trainer = PipelinedDPO(
            model,
            ref_model=reference,
            args=DPOConfig(**settings(options, folder)),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def build_parser() -> argparse.ArgumentParser:
    """Defines the options and their defaults."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a Llama with trl's SFT and DPO over several devices with pipert.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    add = parser.add_argument
    add("--steps", type=int, default=30, help="steps of the optimizer, in each training")
    add("--layers", type=int, default=4, help="layers of the model")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--every", type=int, default=10, help="take one line of so many")
    add("--seed", type=int, default=0, help="seed of the parameters and the batches")
    add("--devices", default=gpus or "cpu,cpu", help="one device per partition")
    return parser


def main(argv: Sequence[str] | None = None) -> tuple[list[float], list[float]]:
    """Trains with the options in ``argv``; returns the losses of SFT and of DPO."""
    # trl 1.16 asks transformers 5.23 by deprecated names; no option of either avoids it.
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing` is deprecated", FutureWarning)
    options = build_parser().parse_args(argv)
    tokenizer = build_tokenizer()
    model = build_model(options, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        sft = train_sft(model, tokenizer, options, folder)
        dpo = train_dpo(model, tokenizer, options, folder)
    print(f"SFT: loss {sft[0]:.2f} at first, {sft[-1]:.2f} at last, per token")
    print(f"DPO: loss {dpo[0]:.2f} at first, {dpo[-1]:.2f} at last, per pair; log 2 is a guess")
    return sft, dpo


if __name__ == "__main__":
    main()
