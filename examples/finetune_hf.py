"""Fine-tune a ``transformers`` Llama with ``peft``'s LoRA adapters, over several devices.

    python examples/finetune_hf.py                    # every GPU there is, else two CPU workers
    python examples/finetune_hf.py --devices cpu,cpu,cpu --microbatches 8 --schedule gpipe
    python examples/finetune_hf.py --save adapter     # keep the trained adapters

The model is the library's own, unchanged: ``pipert.pipeline`` measures it to find where to cut, and
from then on calls of the model run in the pipe. Nothing is downloaded: the model is built from a
configuration, so the frozen base is random, and its head is trained along with the adapters. A
token is a byte of the standard library's source code.

Paragraphs are packed, one after the other without padding, into micro-batches that are ready for
the pipe. A step is a function of one of them: it calls the model, under autocast, and returns its
loss. In the end ``generate`` continues a text, the adapters are saved, and a model without a pipe
loads them and gives the same logits.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pipert

END = 256  # the token after the last byte of a paragraph
IGNORED = -100  # the label of a position that is not predicted
LENGTHS = range(32, 128)  # paragraphs of other lengths, in bytes, are left out
HELD_OUT = 0.1  # the fraction of the text, at its end, that is not trained on
HELD_OUT_PARAGRAPHS = 128  # evenly spread over the held-out part; the loss is measured on these
PROMPT = b"def "  # continued in the end

MicroBatch = dict[str, Tensor]


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
        vocab_size=END + 1,
        pad_token_id=END,
        eos_token_id=END,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTHS.stop,
        use_cache=False,  # with a cache, the model would not tell packed paragraphs apart
    )
    return LlamaForCausalLM(config)


def add_adapters(base: LlamaForCausalLM, rank: int) -> Any:
    """Adds adapters to the linear layers; from then on only they and the head are trained."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.05,
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


def packed(paragraphs: Sequence[bytes]) -> MicroBatch:
    """Packs paragraphs into one row: ``input_ids``, ``position_ids`` and ``labels``, each int64.

    Positions begin anew with each paragraph, by which the model tells them apart. The first byte of
    a paragraph is not predicted.
    """
    ids = [torch.tensor([*part, END]) for part in paragraphs]
    firsts = [torch.arange(len(part)) == 0 for part in ids]
    labels = torch.cat(ids).masked_fill(torch.cat(firsts), IGNORED)
    positions = torch.cat([torch.arange(len(part)) for part in ids])
    return {
        "input_ids": torch.cat(ids)[None], "position_ids": positions[None], "labels": labels[None],
    }  # fmt: skip


def number_of(microbatches: Iterable[MicroBatch]) -> int:
    """Returns how many tokens are predicted."""
    return sum(int(each["labels"][:, 1:].ne(IGNORED).sum()) for each in microbatches)


def draw(paragraphs: Sequence[bytes], options: argparse.Namespace) -> Iterator[list[MicroBatch]]:
    """Yields the micro-batches of a step, with random paragraphs, without end."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = options.microbatches, options.paragraphs
    while True:
        places = torch.randint(len(paragraphs), shape, generator=generator)
        yield [packed([paragraphs[place] for place in row]) for row in places.tolist()]


# --- training -------------------------------------------------------------------------------------


def train(
    pipe: pipert.ModulePipe, steps: Iterator[list[MicroBatch]], options: argparse.Namespace
) -> None:
    """Trains for ``--steps`` steps. The base is frozen; the optimizer has adapters and head."""
    model = pipe.module.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    for number, microbatches in enumerate(itertools.islice(steps, options.steps), 1):
        tokens = number_of(microbatches)

        def step(microbatch: MicroBatch, tokens: int = tokens) -> Tensor:
            with torch.autocast(microbatch["input_ids"].device.type, torch.bfloat16):
                output = model(**microbatch, num_items_in_batch=tokens)
            loss: Tensor = output.loss  # the sum over this micro-batch, divided by ``tokens``
            return loss

        loss = pipe.forward_backward(
            microbatches=microbatches, step=step, reduction="sum", schedule=options.schedule
        )
        nn.utils.clip_grad_norm_(trained, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0 or number == options.steps:
            print(f"step {number}: loss {loss.item():.3f}")


def evaluate(pipe: pipert.ModulePipe, paragraphs: Sequence[bytes], per: int) -> float:
    """Returns the mean loss per token; the devices work on several micro-batches at a time."""
    pipe.module.eval()
    held_out = [packed(paragraphs[k : k + per]) for k in range(0, len(paragraphs), per)]
    with torch.no_grad():
        outputs = pipe.map({**each, "num_items_in_batch": 1} for each in held_out)
        total = sum(float(output["loss"].sum()) for output in outputs)
    return total / number_of(held_out)


def difference_when_loaded(
    pipe: pipert.ModulePipe, folder: Path, rows: MicroBatch, options: argparse.Namespace
) -> float:
    """Loads the adapters into a model without a pipe; returns the largest difference in logits."""
    plain = PeftModel.from_pretrained(build_base(options), folder).eval()
    with torch.no_grad():
        ours, expected = pipe.module.eval()(**rows).logits, plain(**rows).logits
    return float((ours.cpu() - expected).abs().max())


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
    add("--microbatches", type=positive, default=4, help="micro-batches in a step")
    add("--paragraphs", type=positive, default=4, help="paragraphs in a micro-batch")
    add("--width", type=positive, default=128, help="features per token, a multiple of 8")
    add("--layers", type=positive, default=4, help="layers of the model")
    add("--rank", type=positive, default=8, help="rank of the adapters")
    add("--lr", type=float, default=5e-3, help="learning rate")
    add("--seed", type=int, default=0, help="seed of the parameters and the batches")
    add("--data", type=Path, help="a text file; if omitted, the standard library")
    add("--devices", default=gpus or "cpu,cpu", help="one device per partition")
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
    stride = math.ceil((len(paragraphs) - first) / HELD_OUT_PARAGRAPHS)
    held_out = paragraphs[first::stride]
    steps = draw(paragraphs[:first], options)
    model = add_adapters(build_base(options), options.rank)
    devices = options.devices.split(",")
    share_cores([torch.device(device) for device in devices])
    pipe = pipert.pipeline(
        model, partitions=len(devices), example=next(steps)[0], devices=devices
    )
    print(pipe)
    with pipe, tempfile.TemporaryDirectory() as temporary:
        before = evaluate(pipe, held_out, options.paragraphs)
        train(pipe, steps, options)
        after = evaluate(pipe, held_out, options.paragraphs)
        prompt = torch.tensor([[*PROMPT]], device=pipe.devices[0])
        (text,) = model.generate(
            input_ids=prompt, max_new_tokens=40, do_sample=True, use_cache=True
        ).tolist()
        folder = options.save or Path(temporary)
        model.save_pretrained(folder)
        rows = packed(held_out[: options.paragraphs])
        difference = difference_when_loaded(pipe, folder, rows, options)
    print("generated:", bytes(token for token in text if token != END).decode("latin-1"))
    print(f"held-out loss: {before:.2f} before, {after:.2f} after {options.steps} steps")
    print(f"loaded into the plain model, the logits differ by {difference:.1e} at most")
    return Result(before, after, difference)


if __name__ == "__main__":
    main()
