"""Train the GPT of ``train_gpt.py`` with several processes, each with a pipe of its own.

    torchrun --nproc_per_node=2 examples/train_ddp.py
    torchrun --nnodes=4 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
        examples/train_ddp.py                                        # on each of four machines
    python examples/train_ddp.py                                     # the same, with one process
    torchrun --nproc_per_node=2 examples/train_ddp.py --resume gpt.pt --steps 200 --save gpt.pt

The processes of a machine divide its GPUs among themselves, and each spreads the model over its
share; without GPUs, over two CPU workers. ``DistributedDataParallel`` wraps the pipe as it would
wrap the model, and averages the gradients of all processes.

``--batch`` counts all processes together. Each draws the same random windows of text and takes
its share of them, so a run is the same, except for rounding, whatever the number of processes:
two processes may save it and one resume it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models.gpt import ModelConfig, build_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import (
    HELD_OUT_WINDOWS,
    cut_windows,
    even_balance,
    positive,
    read_text,
    save_state,
    split_text,
)

from pipert import Pipe


@dataclass(frozen=True)
class Result:
    """Held-out loss in nats per byte, untrained or as resumed, and after ``steps`` steps."""

    before: float
    after: float
    steps: int


# --- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(backend: str) -> Iterator[tuple[int, int]]:
    """Yields this process's rank and the world size, from torchrun or for a single process."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def own_devices() -> list[torch.device]:
    """Returns this process's share of the machine's GPUs, or two CPU workers if it is empty."""
    process = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not count:
        return [torch.device("cpu"), torch.device("cpu")]
    return [torch.device("cuda", process * count + k) for k in range(count)]


# --- training -------------------------------------------------------------------------------------


def loss_of(model: nn.Module, windows: Tensor, devices: list[torch.device]) -> Tensor:
    """Returns the mean cross entropy of the next byte, a scalar on the last device."""
    logits = model(windows[:, :-1].to(devices[0]))
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].to(devices[-1]).flatten())


def evaluate(pipe: Pipe, windows: Tensor, rank: int, world: int) -> float:
    """Returns the mean loss over ``windows``; each process computes its share."""
    share = windows[rank::world]
    total = torch.zeros((), device=pipe.devices[-1])
    pipe.eval()  # not DDP, whose forward could wait for the others
    with torch.no_grad():
        for part in torch.split(share, 16):
            total += loss_of(pipe, part, pipe.devices) * len(part)
    pipe.train()
    dist.all_reduce(total)
    return total.item() / len(windows)


def accumulate(
    ddp: DistributedDataParallel, parts: Sequence[Tensor], devices: list[torch.device]
) -> float:
    """Accumulates gradients of the mean loss of ``parts``; returns that loss in this process.

    They add up locally until the backward of the last part averages them over all processes.
    """
    total = 0.0
    for k, part in enumerate(parts):
        is_last = k == len(parts) - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = loss_of(ddp, part, devices) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


class Training:
    """A pipe in DDP and everything else that the next step depends on."""

    def __init__(self, pipe: Pipe, options: argparse.Namespace) -> None:
        self.pipe, self.options, self.step = pipe, options, 0
        self.optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.lr, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(options.seed)  # the same in each process

    def train(self, text: Tensor, rank: int, world: int) -> None:
        """Step until ``options.steps``."""
        options = self.options
        ddp = DistributedDataParallel(self.pipe)  # after loading: it broadcasts process 0's state
        for step in range(self.step, options.steps):
            places = len(text) - options.context
            starts = torch.randint(places, (options.batch,), generator=self.generator)
            windows = cut_windows(text, starts, options.context)
            shares = [part[rank::world] for part in windows.chunk(options.accumulate)]
            loss = accumulate(ddp, shares, self.pipe.devices)
            nn.utils.clip_grad_norm_(self.pipe.parameters(), max_norm=1.0)  # the same in all
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step = step + 1
            if rank == 0 and (self.step % 10 == 0 or self.step == options.steps):
                print(f"step {self.step}: loss {loss:.3f} in process 0", flush=True)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, which ``torch.load(..., weights_only=True)`` takes."""
        return {
            "model": self.pipe.state_dict(),  # under the plain module's names; DDP's has others
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "batches": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, by however many processes."""
        self.pipe.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.generator.set_state(state["batches"])


# --- the command line -----------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Every option, with its default."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT with several processes, each with a pipe.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, model = parser.add_argument, ModelConfig()
    add("--steps", type=positive, default=100, help="to be reached, those before --resume included")
    add("--batch", type=positive, default=32, help="windows of text in a step, of all processes")
    add("--accumulate", type=positive, default=2, help="parts of a step, one after the other")
    add("--context", type=positive, default=model.context, help="bytes the model sees")
    add("--width", type=positive, default=model.width, help="features of a token")
    add("--layers", type=positive, default=model.layers, help="transformer blocks")
    add("--heads", type=positive, default=model.heads, help="attention heads of a block")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of the parameters and the batches")
    add("--data", type=Path, help="a text file, or a folder of them; else the standard library")
    add("--chunks", type=positive, default=4, help="micro-batches in a part")
    add("--save", type=Path, help="process 0 writes the trained state to this file")
    add("--resume", type=Path, help="go on from such a file, which each process reads")
    add("--backend", help="of the process group; else nccl with GPUs and gloo without")
    return parser


def load_state(path: Path) -> dict[str, Any]:
    """Loads a file of ``--save`` onto the CPU; ``ValueError`` if it is anything else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {key: state[key] for key in ("config", "training")}
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file that --save wrote: {error}") from error


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ModelConfig, dict[str, Any] | None]:
    """Returns the options, the model's shape and the state to resume; ``ValueError`` if wrong."""
    options, saved = parser.parse_args(argv), None
    if options.resume is not None:
        saved = load_state(options.resume)
        parser.set_defaults(**saved["config"])
        options = parser.parse_args(argv)
    names = asdict(ModelConfig()).keys() & vars(options).keys()
    config = ModelConfig(**{name: getattr(options, name) for name in names})
    if saved is not None and asdict(config) != saved["config"]:
        raise ValueError(f"--resume fixes the model to {saved['config']}; leave these options out")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.batch % (world * options.accumulate):
        raise ValueError(
            f"--batch {options.batch} must divide evenly among {world} processes and "
            f"--accumulate {options.accumulate} parts: the mean of unequal shares is another"
        )
    if options.save is not None and not options.save.parent.is_dir():
        raise ValueError(f"--save needs a folder that exists, not {options.save.parent}")
    if options.save is not None and options.save.is_dir():
        raise ValueError(f"--save needs a file, and {options.save} is a folder")
    if options.backend is None:
        options.backend = "nccl" if own_devices()[0].type == "cuda" else "gloo"
    return options, config, saved


def main(argv: Sequence[str] | None = None) -> Result:
    """Train as ``argv`` says; an error in it exits with a message and code 2."""
    parser = build_parser()
    try:
        options, config, saved = read_options(parser, argv)
        training, held_out = split_text(read_text(options.data), config.context)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    starts = torch.linspace(0, len(held_out) - config.context - 1, HELD_OUT_WINDOWS).long()
    windows = cut_windows(held_out, starts, config.context)
    torch.manual_seed(options.seed)
    model, devices = build_model(config), own_devices()
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])  # where NCCL works without tensors
    balance = even_balance(len(model), len(devices))
    with (
        process_group(options.backend) as (rank, world),
        Pipe(model, balance, devices=devices, chunks=options.chunks) as pipe,
    ):
        if rank == 0:
            where = ", ".join(f"{b} on {d}" for b, d in zip(balance, pipe.devices, strict=True))
            print(f"{world} processes; in process 0, of {len(model)} layers: {where}", flush=True)
        run = Training(pipe, options)
        if saved is not None:
            run.load_state_dict(saved["training"])
        before = evaluate(pipe, windows, rank, world)
        run.train(training, rank, world)
        if options.save is not None and rank == 0:
            save_state(options.save, {"config": asdict(config), "training": run.state_dict()})
        after = evaluate(pipe, windows, rank, world)
    if rank == 0:
        print(f"held-out loss: {before:.2f} before, {after:.2f} after {run.step} steps")
    return Result(before, after, run.step)


if __name__ == "__main__":
    main()
