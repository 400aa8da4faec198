"""Train a small GPT, written as a plain ``nn.Sequential``, over several devices.

    python examples/train_gpt.py                   # every GPU there is, else two CPU workers
    python examples/train_gpt.py --devices cpu,cpu,cpu --balance 2,2,2 --chunks 8
    python examples/train_gpt.py --stop-at 40 --save gpt.pt       # the first half of a run
    python examples/train_gpt.py --resume gpt.pt --save gpt.pt    # the second half
    python examples/train_gpt.py --resume gpt.pt --sample 1000    # finished: only generate text
    torchrun --nproc_per_node=2 examples/train_gpt.py --distributed    # one process per device

The first command takes about 15 seconds on two idle cores and ends by printing what to try next.

The training text is on every machine with Python: the source code of the standard library, read
as bytes, so the vocabulary is 256 and there is no tokenizer. The last tenth is held out.

The model (models/gpt.py) does not know about pipelines. One line, ``Pipe(...)``, pipelines the
training. Besides that, each batch is moved to the first device, and its targets to the last one,
where the logits come out. ranks.py has what the same loop needs under torchrun.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import sysconfig
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models.gpt import ModelConfig, build_model
from ranks import (
    AnyPipe,
    RanksPipe,
    clip,
    is_first,
    join,
    leave,
    load_whole_state,
    say,
    whole_state,
)
from torch import Tensor, nn
from tqdm import tqdm

from pipert import Pipe

MAX_BYTES = 4_000_000  # the most text to read
HELD_OUT = 0.1  # the fraction of the text, at its end, that is not trained on
SCHEDULES = ("autograd", "gpipe", "1f1b", "eager-1f1b")
HELD_OUT_WINDOWS = 128  # evenly spread over the held-out part; the loss is measured on these
TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")  # which files of a folder to read
PROMPT = b"def "  # continued by the generated sample

GO_ON = """What to try next: python examples/train_gpt.py with
  --steps 1000              more steps: so far it knows little more than which bytes are common
  --save gpt.pt             a checkpoint; later --resume gpt.pt --steps 1000 continues from it
  --devices cpu,cpu,cpu --balance 2,2,2 --chunks 8    other devices (cuda:0,...), layers per device
  --help                    everything else"""

# Saved with the model's shape, so that a resumed run continues unchanged. The devices may differ.
SAVED_OPTIONS = ("steps", "batch", "lr", "warmup", "seed", "data", "chunks", "checkpoint")


@dataclass(frozen=True)
class Result:
    """Held-out loss in nats per byte, untrained and after ``steps`` steps; generated sample."""

    before: float
    after: float
    steps: int
    sample: bytes


# --- the text -------------------------------------------------------------------------------------


def read_text(path: Path | None) -> bytes:
    """Reads a file, all text files of a folder, or (``None``) the standard library, sorted."""
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)
    else:
        files = [path]
    return b"".join(file.read_bytes() for file in files)[:MAX_BYTES]


def split_text(text: bytes, context: int) -> tuple[Tensor, Tensor]:
    """Splits off the held-out text, both uint8; ``ValueError`` if either has no whole window."""
    held_out = int(len(text) * HELD_OUT)
    if held_out <= context:
        raise ValueError(
            f"the text is too short: a tenth of it is held out, so --context {context} needs "
            f"{math.ceil((context + 1) / HELD_OUT)} bytes, and there are {len(text)}"
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens[:-held_out], tokens[-held_out:]


def cut_windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Cuts ``context + 1`` bytes from each start, int64: inputs and, shifted by one, targets."""
    return text[starts[:, None] + torch.arange(context + 1)].long()


# --- training -------------------------------------------------------------------------------------


def loss_of(pipe: AnyPipe, windows: Tensor) -> Tensor:
    """Returns the mean cross entropy of the next byte, a scalar on the last device."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    logits = pipe(inputs.to(pipe.devices[0]))
    return next_byte_loss(logits, targets.to(pipe.devices[-1]))


def loss_with_gradients(pipe: AnyPipe, windows: Tensor, schedule: str) -> Tensor:
    """Computes the same loss and adds its gradients to ``.grad``.

    ``autograd`` runs the whole backward after the whole forward. The schedules of
    ``forward_backward`` run it on the workers, micro-batch by micro-batch.
    """
    if schedule == "autograd":
        loss = loss_of(pipe, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
    result: Tensor = pipe.forward_backward(
        windows[:, :-1], target=windows[:, 1:], loss_fn=next_byte_loss, schedule=schedule
    )
    return result


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy over all positions of all windows."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def evaluate(pipe: AnyPipe, windows: Tensor, batch: int) -> float:
    """Returns the mean loss over ``windows``, in nats per byte."""
    pipe.eval()
    with torch.no_grad():
        losses = [loss_of(pipe, part).item() * len(part) for part in torch.split(windows, batch)]
    return math.fsum(losses) / len(windows)


def learning_rate(step: int, peak: float, warmup: int, steps: int) -> float:
    """Rises linearly to ``peak`` over the warm-up, then follows a cosine down to a tenth of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainer:
    """A pipe and everything its next step depends on: optimizer, step and random states."""

    def __init__(self, pipe: AnyPipe, options: argparse.Namespace) -> None:
        self.pipe, self.options, self.step = pipe, options, 0
        self.optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.lr, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(options.seed)  # draws the batches

    def train(self, text: Tensor, stop: int) -> None:
        """Trains up to step ``stop``; each batch is windows from random positions in ``text``."""
        options, began = self.options, time.perf_counter()
        self.pipe.train()
        steps = range(self.step, stop)
        with tqdm(
            steps, "training", total=stop, initial=self.step, unit="step", disable=not is_first()
        ) as bar:
            for done, step in enumerate(bar, start=1):
                places = len(text) - options.context
                starts = torch.randint(places, (options.batch,), generator=self.generator)
                windows = cut_windows(text, starts, options.context)
                self.optimizer.zero_grad()
                loss = loss_with_gradients(self.pipe, windows, options.schedule)
                clip(self.pipe)
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(step, options.lr, options.warmup, options.steps)
                self.optimizer.step()
                self.step = step + 1
                speed = done * options.batch * options.context / (time.perf_counter() - began)
                bar.set_postfix_str(f"loss {loss.item():.3f}, {speed:,.0f} tokens/s")

    def state_dict(self) -> dict[str, Any]:
        """Returns only what ``torch.load(..., weights_only=True)`` accepts."""
        model, optimizer = whole_state(self.pipe, self.optimizer)
        return {
            "model": model,  # under the plain module's names
            "optimizer": optimizer,
            "step": self.step,
            "batches": self.generator.get_state(),
            "random": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],  # for dropout
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; random states of missing GPUs are skipped."""
        load_whole_state(self.pipe, self.optimizer, state["model"], state["optimizer"])
        self.step = state["step"]
        self.generator.set_state(state["batches"])
        torch.set_rng_state(state["random"][0])
        for index, random in enumerate(state["random"][1 : 1 + torch.cuda.device_count()]):
            torch.cuda.set_rng_state(random, index)


def generate(pipe: AnyPipe, count: int, context: int, temperature: float, seed: int) -> bytes:
    """Generates ``count`` bytes after ``PROMPT``, each drawn from the model's prediction."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(PROMPT)])  # [1, time], growing
    pipe.eval()
    with torch.no_grad():
        for _ in range(count):
            logits = pipe(tokens[:, -context:].to(pipe.devices[0]))[:, -1].cpu()
            probabilities = F.softmax(logits / temperature, dim=-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
    return bytes(tokens[0, len(PROMPT) :].tolist())


def make_pipe(
    model: nn.Sequential, options: argparse.Namespace
) -> AnyPipe:
    """Makes the pipe described by the options."""
    settings = {"chunks": options.chunks, "checkpoint": options.checkpoint}
    if not options.distributed:
        devices = options.devices
        return Pipe(model, options.balance, devices=devices, **settings)
    return RanksPipe(model, options.balance, schedule=options.schedule, **settings)


# --- the command line -----------------------------------------------------------------------------


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes ``state`` to ``path``, replacing an earlier file only once the new one is complete."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load_state(path: Path) -> dict[str, Any]:
    """Loads a file written by :func:`save_state` onto the CPU; ``ValueError`` for any other."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {key: state[key] for key in ("config", "options", "trainer")}
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file that --save wrote: {error}") from error


def positive(text: str) -> int:
    """Parses an integer of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def integers(text: str) -> list[int]:
    """Parses ``'3,3'`` as ``[3, 3]``."""
    return [int(number) for number in text.split(",")]


def devices(text: str) -> list[torch.device]:
    """Parses ``'cpu,cpu'`` as two devices."""
    try:
        return [torch.device(name.strip()) for name in text.split(",")]
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be like cpu,cpu: {error}") from error


def even_balance(layers: int, partitions: int) -> list[int]:
    """Divides ``layers`` evenly among at most ``partitions`` partitions, larger ones first."""
    partitions = min(layers, partitions)
    return [layers // partitions + (j < layers % partitions) for j in range(partitions)]


def build_parser() -> argparse.ArgumentParser:
    """Defines the options and their defaults."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT over several devices with pipert.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    modes = ("always", "except_last", "never")
    add, model = parser.add_argument, ModelConfig()
    add("--steps", type=positive, default=80, help="steps of the learning-rate schedule")
    add("--stop-at", type=positive, help="stop after this step; --resume continues")
    add("--batch", type=positive, default=8, help="windows of text in a mini-batch")
    add("--context", type=positive, default=model.context, help="bytes in a window")
    add("--width", type=positive, default=model.width, help="features per token")
    add("--layers", type=positive, default=model.layers, help="transformer blocks")
    add("--heads", type=positive, default=model.heads, help="attention heads per block")
    add("--dropout", type=float, default=model.dropout, help="dropout probability")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=positive, default=20, help="steps until the learning rate peaks")
    add("--seed", type=int, default=0, help="seed of the parameters, the batches and the sample")
    add("--data", help="text file, or folder of text files; if omitted, the standard library")
    add("--devices", type=devices, default=gpus or "cpu,cpu", help="one device per partition")
    add("--distributed", action="store_true", help="under torchrun: one partition per process,"
        " instead of --devices")  # fmt: skip
    add("--balance", type=integers, help="layers (blocks + 2) per device; if omitted, even")
    add("--chunks", type=positive, default=4, help="micro-batches in a mini-batch")
    add("--checkpoint", choices=modes, help="micro-batches to recompute; if omitted, all but the"
        " last, or none with 1f1b and eager-1f1b")  # fmt: skip
    add("--schedule", choices=SCHEDULES, default="autograd", help="order of the tasks")
    add("--save", type=Path, help="write the trained state to this file")
    add("--resume", type=Path, help="continue from such a file, with its model and its options")
    add("--sample", type=int, default=200, help="bytes to generate at the end; 0 for none")
    add("--temperature", type=float, default=0.8, help="sampling temperature; lower is safer")
    return parser


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ModelConfig, dict[str, Any] | None]:
    """Parses the options, the model's shape and the state to resume; ``ValueError`` if invalid.

    Saved options become defaults that the command line overrides. The shape cannot change.
    """
    options, saved = parser.parse_args(argv), None
    if options.resume is not None:
        saved = load_state(options.resume)
        parser.set_defaults(**saved["config"], **saved["options"])
        options = parser.parse_args(argv)
    config = ModelConfig(**{name: getattr(options, name) for name in asdict(ModelConfig())})
    if saved is not None and asdict(config) != saved["config"]:
        raise ValueError(f"--resume fixes the model to {saved['config']}; leave these options out")
    if not min(options.lr, options.temperature) > 0:
        raise ValueError("--lr and --temperature must be above 0")
    if options.save is not None and not options.save.parent.is_dir():
        raise ValueError(f"--save needs a folder that exists, not {options.save.parent}")
    if options.save is not None and options.save.is_dir():
        raise ValueError(f"--save needs a file, and {options.save} is a folder")
    place(options, config)
    return options, config, saved


def place(options: argparse.Namespace, config: ModelConfig) -> None:
    """Fills in the options that depend on the number of devices; joins the other processes."""
    partitions = len(options.devices)
    if options.distributed:
        join()
        partitions = dist.get_world_size()
        if options.schedule == "autograd":
            options.schedule = "1f1b"  # across processes, only a schedule can run the backward
    if options.balance is None:
        options.balance = even_balance(config.layers + 2, partitions)


def share_cores(devices: Sequence[torch.device]) -> None:
    """Limits torch's intra-op threads to each CPU worker's share of the cores.

    The workers compute at the same time. With more threads than cores, the threads of one operation
    wait for each other to be scheduled, which on a busy machine takes several times as long.
    """
    workers = sum(device.type == "cpu" for device in devices)
    if workers:
        share = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(min(torch.get_num_threads(), share))


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains with the options in ``argv``; a wrong option exits with a message and code 2."""
    parser = build_parser()
    try:
        options, config, saved = read_options(parser, argv)
        text = read_text(None if options.data is None else Path(options.data))
        training, held_out = split_text(text, config.context)
        torch.manual_seed(options.seed)
        model = build_model(config)
        pipe = make_pipe(model, options)
    except (IndexError, OSError, ValueError) as error:
        parser.error(str(error))
    if isinstance(pipe, Pipe):
        share_cores(pipe.devices)
    starts = torch.linspace(0, len(held_out) - config.context - 1, HELD_OUT_WINDOWS).long()
    windows = cut_windows(held_out, starts, config.context)
    with pipe if isinstance(pipe, Pipe) else nullcontext():
        places = pipe.devices if isinstance(pipe, Pipe) else range(len(pipe.balance))
        where = ", ".join(f"{b} on {d}" for b, d in zip(pipe.balance, places, strict=True))
        say(f"{len(model)} layers: {where}; {len(training):,} bytes to learn from")
        trainer = Trainer(pipe, options)
        before = evaluate(pipe, windows, options.batch)
        if saved is not None:
            trainer.load_state_dict(saved["trainer"])
        trainer.train(training, min(options.steps, options.stop_at or options.steps))
        if options.save is not None:
            kept = {name: getattr(options, name) for name in SAVED_OPTIONS}
            state = {"config": asdict(config), "options": kept, "trainer": trainer.state_dict()}
            if is_first():
                save_state(options.save, state)
        after = evaluate(pipe, windows, options.batch)
        sample = generate(pipe, options.sample, config.context, options.temperature, options.seed)
    if sample:
        say(f"--- a sample ---\n{(PROMPT + sample).decode(errors='replace')}\n---")
    say(f"held-out loss: {before:.2f} before, {after:.2f} after {trainer.step} steps\n\n{GO_ON}")
    return Result(before, after, trainer.step, sample)


if __name__ == "__main__":
    main()
    leave()
