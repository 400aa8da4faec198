"""Fine-tune a ``transformers`` Llama with ``peft``'s LoRA adapters, over several devices.

    python examples/finetune_hf.py                    # every GPU there is, else two CPU workers
    python examples/finetune_hf.py --devices cpu,cpu,cpu --chunks 8 --schedule gpipe
    python examples/finetune_hf.py --save adapter     # keep the trained adapters

The model is the library's own, unchanged: ``pipert.pipeline`` runs its ``forward`` as it is, and
measures it to find where to cut. Nothing is downloaded: the model is built from a configuration,
so the frozen base is random, and its head is trained along with the adapters. A token is a byte of
the standard library's source code, and a row is a paragraph of it. Rows differ in length, so
batches are padded and the loss counts tokens.

``save_pretrained`` saves the adapters. At the end they are loaded into a model without a pipe,
which gives the same logits.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pipert

PADDING = 256  # the token that follows the 256 bytes
IGNORED = -100  # the label of a position that is not predicted
LENGTHS = range(32, 128)  # paragraphs of other lengths, in bytes, are left out
HELD_OUT = 0.1  # the fraction of the text, at its end, that is not trained on
HELD_OUT_ROWS = 128  # evenly spread over the held-out part; the loss is measured on these

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Result:
    """Held-out loss in nats per byte before and after; largest error of the loaded model."""

    before: float
    after: float
    difference: float


# --- the model ------------------------------------------------------------------------------------


def build_base(options: argparse.Namespace) -> LlamaForCausalLM:
    """Builds a random Llama; in real use, ``from_pretrained`` loads a trained one."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=PADDING + 1,
        pad_token_id=PADDING,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTHS.stop,
        use_cache=False,  # only text generation needs cached keys and values
    )
    return LlamaForCausalLM(config)


def add_adapters(base: LlamaForCausalLM, rank: int) -> Any:
    """Adds adapters to the linear layers; from then on only they and the head are trained."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        target_modules=r".*_proj",
        modules_to_save=["lm_head"],
    )
    return get_peft_model(base, config)


# --- the text -------------------------------------------------------------------------------------


def read_paragraphs(path: Path | None) -> list[bytes]:
    """Reads the paragraphs of a file or, for ``None``, of the standard library, in order."""
    files = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n\n".join(file.read_bytes() for file in files)
    return [part for part in text.split(b"\n\n") if len(part) in LENGTHS]


def batch_of(paragraphs: Sequence[bytes]) -> Batch:
    """Pads rows to the longest: ``input_ids``, ``attention_mask`` and ``labels``, each int64."""
    rows = [torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in paragraphs]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    is_byte = ids != PADDING
    labels = ids.masked_fill(~is_byte, IGNORED)
    return {"input_ids": ids, "attention_mask": is_byte.long(), "labels": labels}


def draw_batches(paragraphs: Sequence[bytes], options: argparse.Namespace) -> Iterator[Batch]:
    """Yields batches of random paragraphs, without end."""
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        places = torch.randint(len(paragraphs), (options.batch,), generator=generator)
        yield batch_of([paragraphs[place] for place in places.tolist()])


# --- training -------------------------------------------------------------------------------------


def number_of(labels: Tensor) -> Tensor:
    """Returns how many bytes are predicted: all except each row's first."""
    return labels[:, 1:].ne(IGNORED).sum()


def next_byte_loss(output: Any, labels: Tensor) -> Tensor:
    """Returns the sum of the losses of all bytes except each row's first.

    It does not return the mean, because micro-batches contain different amounts of padding.
    """
    targets = labels[:, 1:].flatten()
    logits = output.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def train(pipe: pipert.ModulePipe, batches: Iterator[Batch], options: argparse.Namespace) -> None:
    """Trains for ``--steps`` steps. The base is frozen; the optimizer has adapters and head."""
    trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    pipe.train()
    for step in range(1, options.steps + 1):
        batch: dict[str, Any] = dict(next(batches))
        labels = batch.pop("labels")
        loss = pipe.forward_backward(
            **batch, target=labels, loss_fn=next_byte_loss, denominator=number_of(labels),
            schedule=options.schedule,
        )  # fmt: skip
        nn.utils.clip_grad_norm_(trained, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps:
            print(f"step {step}: loss {loss.item():.3f}")


def evaluate(pipe: pipert.ModulePipe, paragraphs: Sequence[bytes], batch: int) -> float:
    """Returns the mean loss per byte."""
    pipe.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(paragraphs), batch):
            rows = batch_of(paragraphs[first : first + batch])
            labels = rows.pop("labels").to(pipe.devices[-1])
            total += next_byte_loss(pipe(**rows), labels).item()
            count += int(number_of(labels))
    return total / count


def difference_when_loaded(
    pipe: pipert.ModulePipe, folder: Path, rows: Batch, options: argparse.Namespace
) -> float:
    """Loads the adapters into a model without a pipe; returns the largest difference in logits."""
    plain = PeftModel.from_pretrained(build_base(options), folder).eval()
    pipe.eval()
    with torch.no_grad():
        ours, expected = pipe(**rows).logits.cpu(), plain(**rows).logits
    is_byte = rows["attention_mask"].bool()
    return float((ours - expected)[is_byte].abs().max())


# --- the command line -----------------------------------------------------------------------------


def positive(text: str) -> int:
    """Parses an integer of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Defines the options and their defaults."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a Llama with LoRA adapters over several devices with pipert.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    add = parser.add_argument
    add("--steps", type=positive, default=50, help="steps of the optimizer")
    add("--batch", type=positive, default=16, help="paragraphs in a mini-batch")
    add("--width", type=positive, default=128, help="features per token, a multiple of 8")
    add("--layers", type=positive, default=4, help="layers of the model")
    add("--rank", type=positive, default=8, help="rank of the adapters")
    add("--lr", type=float, default=5e-3, help="learning rate")
    add("--seed", type=int, default=0, help="seed of the parameters and the batches")
    add("--data", type=Path, help="a text file; if omitted, the standard library")
    add("--devices", default=gpus or "cpu,cpu", help="one device per partition")
    add("--chunks", type=positive, default=4, help="micro-batches in a mini-batch")
    add("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="order of the tasks")
    add("--save", type=Path, help="folder for the adapters; else they are not kept")
    return parser


def share_cores(devices: Sequence[torch.device]) -> None:
    """Limits torch's intra-op threads to each CPU worker's share of the cores."""
    workers = sum(device.type == "cpu" for device in devices)
    if workers:
        share = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(min(torch.get_num_threads(), share))


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains with the options in ``argv``."""
    # peft 0.21 asks transformers 5.23 by a deprecated name; no option of either avoids it.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    parser = build_parser()
    options = parser.parse_args(argv)
    paragraphs = read_paragraphs(options.data)
    first = int(len(paragraphs) * (1 - HELD_OUT))
    if not 0 < first < len(paragraphs):
        parser.error(f"the text is too short: it has {len(paragraphs)} paragraphs of {LENGTHS}")
    held_out = paragraphs[first :: math.ceil((len(paragraphs) - first) / HELD_OUT_ROWS)]
    batches = draw_batches(paragraphs[:first], options)
    model = add_adapters(build_base(options), options.rank)
    devices = options.devices.split(",")
    share_cores([torch.device(device) for device in devices])
    pipe = pipert.pipeline(
        model,
        partitions=len(devices),
        example=next(batches),
        devices=devices,
        chunks=options.chunks,
    )
    print(pipe)
    with pipe, tempfile.TemporaryDirectory() as temporary:
        before = evaluate(pipe, held_out, options.batch)
        train(pipe, batches, options)
        after = evaluate(pipe, held_out, options.batch)
        folder = options.save or Path(temporary)
        model.save_pretrained(folder)  # model is pipe.module
        rows = batch_of(held_out[: options.batch])
        rows.pop("labels")
        difference = difference_when_loaded(pipe, folder, rows, options)
    print(f"held-out loss: {before:.2f} before, {after:.2f} after {options.steps} steps")
    print(f"loaded into the plain model, the logits differ by {difference:.1e} at most")
    return Result(before, after, difference)


if __name__ == "__main__":
    main()
