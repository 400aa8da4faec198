"""Train the GPT of ``train_gpt.py`` with several processes, each with a pipe of its own.

    torchrun --nproc_per_node=2 examples/train_ddp.py
    torchrun --nnodes=4 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
        examples/train_ddp.py                                        # on each of four machines
    python examples/train_ddp.py                                     # the same in one process
    torchrun --nproc_per_node=2 examples/train_ddp.py --resume gpt.pt --steps 200 --save gpt.pt

The processes of a machine divide its GPUs among themselves. Each process spreads the model over
its share, or over two CPU workers if there are no GPUs. ``DistributedDataParallel`` wraps the pipe
as it would wrap the model, and averages the gradients over all processes.

``--batch`` is the total over all processes. Each process draws the same random windows of text and
takes its share of them, so a run does not depend on the number of processes, except for rounding:
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
    """Held-out loss in nats per byte, when the program starts and after ``steps`` steps."""

    before: float
    after: float
    steps: int


# --- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(backend: str) -> Iterator[tuple[int, int]]:
    """Joins torchrun's process group, or one of this process alone; yields rank and world size.

    After a failure it does not leave the group: that would wait for what the others have not done.
    """
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield dist.get_rank(), dist.get_world_size()
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
    pipe.eval()  # not through DDP, whose forward could wait for the other processes
    with torch.no_grad():
        for part in torch.split(share, 16):
            total += loss_of(pipe, part, pipe.devices) * len(part)
    pipe.train()
    dist.all_reduce(total)
    return total.item() / len(windows)


def accumulate(
    ddp: DistributedDataParallel, parts: Sequence[Tensor], devices: list[torch.device]
) -> float:
    """Accumulates the gradients of the mean loss of ``parts``; returns this process's loss.

    The gradients add up locally until the last backward averages them over all processes.
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
        self.generator = torch.Generator().manual_seed(options.seed)  # same in every process

    def train(self, text: Tensor, rank: int, world: int) -> None:
        """Trains up to step ``options.steps``."""
        options = self.options
        ddp = DistributedDataParallel(self.pipe)  # after loading: it broadcasts process 0's state
        for step in range(self.step, options.steps):
            places = len(text) - options.context
            starts = torch.randint(places, (options.batch,), generator=self.generator)
            windows = cut_windows(text, starts, options.context)
            shares = [part[rank::world] for part in windows.chunk(options.accumulate)]
            loss = accumulate(ddp, shares, self.pipe.devices)
            nn.utils.clip_grad_norm_(self.pipe.parameters(), max_norm=1.0)  # same everywhere
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step = step + 1
            if rank == 0 and (self.step % 10 == 0 or self.step == options.steps):
                print(f"step {self.step}: loss {loss:.3f} in process 0", flush=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns only what ``torch.load(..., weights_only=True)`` accepts."""
        return {
            "model": self.pipe.state_dict(),  # with the plain module's names, unlike DDP's
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "batches": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned in any number of processes."""
        self.pipe.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.generator.set_state(state["batches"])


# --- the command line -----------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Defines the options and their defaults."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT with several processes, each with a pipe.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, model = parser.add_argument, ModelConfig()
    add("--steps", type=positive, default=100, help="total steps, including those before --resume")
    add("--batch", type=positive, default=32, help="windows of text per step, in all processes")
    add("--accumulate", type=positive, default=2, help="parts of a step, one after the other")
    add("--context", type=positive, default=model.context, help="bytes in a window")
    add("--width", type=positive, default=model.width, help="features per token")
    add("--layers", type=positive, default=model.layers, help="transformer blocks")
    add("--heads", type=positive, default=model.heads, help="attention heads per block")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--seed", type=int, default=0, help="seed of the parameters and the batches")
    add("--data", type=Path, help="text file, or folder of text files; else the standard library")
    add("--chunks", type=positive, default=4, help="micro-batches in a part")
    add("--save", type=Path, help="process 0 writes the trained state to this file")
    add("--resume", type=Path, help="continue from such a file, which each process reads")
    add("--backend", help="of the process group; if omitted, nccl with GPUs and gloo without")
    return parser


def load_state(path: Path) -> dict[str, Any]:
    """Loads a file written by ``--save`` onto the CPU; ``ValueError`` for any other."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {key: state[key] for key in ("config", "training")}
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file that --save wrote: {error}") from error


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ModelConfig, dict[str, Any] | None]:
    """Parses the options, the model's shape and the state to resume; ``ValueError`` if invalid."""
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
    """Trains with the options in ``argv``; a wrong option exits with a message and code 2."""
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
        torch.cuda.set_device(devices[0])  # for NCCL operations that have no tensor
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
