"""Measures peak memory on each *simulated* device.

A small U-Net (B, C) and a GPT, split evenly by layers, run on simulated GPUs
(tests/simulated_gpus): bytes are counted exactly, but not on a GPU. *in lockstep* runs one task at
a time, so that the peak is the same each time; *threads* is a normal run. torchgpipe 0.0.7 has only
its own schedule; *plain* is the module on one device.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]

from tests import simulated_gpus  # noqa: E402

GPUS = simulated_gpus.start()  # before torch

import torch  # noqa: E402
import torchgpipe  # noqa: E402
from _measure import Row, report  # noqa: E402
from _models import for_torchgpipe  # noqa: E402
from torch import nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

from pipert import Pipe  # noqa: E402
from tests.devices.lockstep import in_lockstep  # noqa: E402
from tests.devices.subjects import SUBJECTS, Subject, even  # noqa: E402

__all__ = ["main"]

WAYS = ("backward", "gpipe", "1f1b")
MODES = ("never", "except_last", "always")
KIB = 1024


def peak_of(step: Callable[[], object], devices: int) -> list[int]:
    """Runs ``step``; returns each device's peak in bytes."""
    for device in range(devices):
        torch.cuda.reset_peak_memory_stats(device)
    step()
    return [GPUS.peak_bytes(device) for device in range(devices)]


Order = contextlib.AbstractContextManager[Any]


def of_pipert(
    subject: Subject, n: int, m: int, way: str, mode: str, order: Order
) -> list[int]:
    """Takes a step with pipert; returns each device's peak in bytes."""
    x, target = subject.batch(m, n)
    model, devices = copy.deepcopy(subject.model), [f"cuda:{j}" for j in range(n)]

    def step() -> None:
        if way == "backward":
            torch.autograd.backward(subject.loss_fn(pipe(x), target))
        else:
            pipe.forward_backward(x, target=target, loss_fn=subject.loss_fn, schedule=way)

    balance = even(len(model), n)
    with Pipe(model, balance, devices=devices, chunks=m, checkpoint=mode) as pipe, order:
        return peak_of(step, n)


def of_torchgpipe(subject: Subject, n: int, m: int, mode: str) -> list[int]:
    """Takes a step with torchgpipe; returns each device's peak in bytes.

    Its recomputation cannot begin with an in-place layer, so such a layer works out of place here.
    """
    x, target = subject.batch(m, n)
    module, balance = for_torchgpipe(copy.deepcopy(subject.model)), even(len(subject.model), n)
    devices = [f"cuda:{j}" for j in range(n)]
    for j in range(n):
        first: Any = module[sum(balance[:j])]
        if getattr(first, "inplace", False):
            first.inplace = False
    peer: Any = torchgpipe.GPipe(module, balance, devices=devices, chunks=m, checkpoint=mode)
    return peak_of(lambda: torch.autograd.backward(subject.loss_fn(peer(x), target)), n)


def of_plain(subject: Subject, m: int) -> int:
    """Takes a step of the whole model and mini-batch on one device; returns its peak in bytes."""
    x, target = subject.batch(m, 1)
    module: nn.Sequential = copy.deepcopy(subject.model).to("cuda:0")
    return peak_of(lambda: torch.autograd.backward(subject.loss_fn(module(x), target)), 1)[0]


def rows(subject: Subject, n: int, m: int) -> Iterator[Row]:
    """Yields a row for each way, mode and device."""
    for mode in MODES:
        peer = of_torchgpipe(subject, n, m, mode)
        for way in WAYS:
            slow = of_pipert(subject, n, m, way, mode, in_lockstep())
            free = of_pipert(subject, n, m, way, mode, contextlib.nullcontext())
            for j in range(n):
                kib = [f"{size / KIB:.0f}" for size in (slow[j], free[j])]
                other = f"{peer[j] / KIB:.0f}" if way == "backward" else "-"
                yield Row((mode, way, f"simulated {j}", *kib, other))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4, help="devices, 2 to 7; default 4")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches; default 8")
    arguments = parser.parse_args(argv)
    n, m = arguments.devices, arguments.chunks
    GPUS.detect(False)
    columns = ("checkpoint", "way", "device", "in lockstep", "threads", "torchgpipe 0.0.7")
    torch.manual_seed(0)
    for subject in tqdm([make() for make in SUBJECTS.values()], desc="models", file=sys.stderr):
        plain = of_plain(subject, m)
        report(
            f"{subject.name}, n={n} m={m}, simulated, KiB; plain on one device: {plain / KIB:.0f}",
            columns, list(rows(subject, n, m)),
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
