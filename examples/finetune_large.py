"""Fine-tune a model that is nowhere as a whole: planned on meta, loaded by part.

    python examples/finetune_large.py                 # every GPU there is, else two CPU workers
    python examples/finetune_large.py --memory 20GiB --folder checkpoint

The checkpoint is a folder of safetensors shards. Without ``--folder``, a small random Llama is
written as one first, since nothing is downloaded. From then on no process holds the model: it is
built on the meta device, measured layer by layer with made-up values, and each shard is loaded to
the devices that compute with it. A token is a byte of the standard library's source code.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pipert

LENGTH = 64  # tokens of a row
BYTES = 256


class Result(NamedTuple):
    """Losses in nats per byte of the first and of the last step."""

    first: float
    last: float


def write_shards(folder: Path, options: argparse.Namespace) -> None:
    """Write a random model as several files; in real use, it is downloaded."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500KB")


def mini_batches(options: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Yield random rows of the standard library, without end."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (options.rows,), generator=generator)
        ids = torch.stack([text[start : start + LENGTH] for start in starts.tolist()]).long()
        yield {"input_ids": ids, "labels": ids}


def train(pipe: Any, batches: Iterator[dict[str, Tensor]], steps: int) -> Result:
    """Train all weights. The optimizer's state is where its weights are."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    losses = []
    for number, batch in enumerate(itertools.islice(batches, steps), 1):
        losses.append(float(pipe.forward_backward(**batch)))
        nn.utils.clip_grad_norm_(pipe.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0 or number == steps:
            print(f"step {number}: loss {losses[-1]:.3f}")
    return Result(losses[0], losses[-1])


def main(argv: Sequence[str] | None = None) -> Result:
    """Train with the options in ``argv``."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a model that fits nowhere as a whole with pipert.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    add = parser.add_argument
    add("--folder", type=Path, help="a checkpoint of a causal model whose tokens are bytes")
    add("--memory", default="1GiB", help="what each device may use")
    add("--devices", default=gpus or "cpu,cpu", help="one device per partition")
    add("--steps", type=int, default=50, help="steps of the optimizer")
    add("--rows", type=int, default=16, help="rows of a mini-batch")
    add("--width", type=int, default=128, help="features of the small model")
    add("--layers", type=int, default=8, help="layers of the small model")
    add("--seed", type=int, default=0, help="seed of the small model and of the rows")
    add("--save", type=Path, help="folder for the trained model; else it is not kept")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.folder is None:
            write_shards(folder, options)
        batches = mini_batches(options)

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        plan = pipert.plan_for(
            model, next(batches), memory=options.memory, optimizer=torch.optim.AdamW,
            devices=options.devices.split(","),
        )[0]  # fmt: skip
        print(plan.report(), end="\n\n")
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=plan.device_map)

        with plan.make(model) as pipe:
            result = train(pipe, batches, options.steps)
            if options.save:
                model.save_pretrained(options.save, max_shard_size="5GB")
    print(f"loss: {result.first:.2f} in the first step, {result.last:.2f} in the last")
    return result


if __name__ == "__main__":
    main()
