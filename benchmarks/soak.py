"""Runs thousands of steps of every kind in one process: each must be right, and nothing may grow.

Steps are drawn from a seed: training and evaluation with different batch sizes, modes, numbers of
micro-batches and checkpointing each time, several callers at once, layers that raise in the forward
or in a recomputation, layers that return late, interrupted callers, workers killed from outside,
pipes that are closed and made again. Results of good steps are compared with the plain module; a
bad step must raise the requested error; the next step must be good.

At rest, between steps, the resources of the process are measured (see ``_usage.py``); the table
shows them. The exit code is 1 if something grew; a wrong step ends with a traceback. ``--leak``
leaks on purpose, to show that this is detected.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from _soak_steps import PATIENCE, Soak
from _usage import freeze, growth, head, line, sample

from pipert import __version__

__all__ = ["main"]

SAMPLES = 40


class Leak:
    """The leak that ``--leak`` asks for; called after each step."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind
        self.kept: list[Any] = []
        self.never = threading.Event()

    def __call__(self, steps: int) -> None:
        if self.kind == "threads" and steps % 100 == 0:
            threading.Thread(target=self.never.wait, daemon=True).start()
        elif self.kind == "tensors" and steps % 100 == 0:
            self.kept.append(torch.zeros(1))
        elif self.kind == "objects":
            self.kept.append([])
        elif self.kind == "memory":
            self.kept.append(bytearray(8192))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="how long; default 5 if --steps is missing")
    parser.add_argument("--steps", type=int, help="how many; ends at whichever comes first")
    parser.add_argument("--short", action="store_true", help="twenty seconds, for CI")
    parser.add_argument("--seed", type=int, default=0)
    cuda = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    devices = [cuda[k * len(cuda) // 3] for k in range(3)] if cuda else ["cpu"] * 3
    parser.add_argument("--devices", nargs=3, default=devices, help="of the three partitions")
    parser.add_argument("--leak", choices=("threads", "tensors", "objects", "memory"))
    arguments = parser.parse_args(argv)
    if arguments.short:
        arguments.minutes = 1 / 3
    elif arguments.minutes is None and arguments.steps is None:
        arguments.minutes = 5.0
    return arguments


def soak(soaking: Soak, arguments: argparse.Namespace) -> list[tuple[float, ...]]:
    """Takes steps until the time or their number is reached; prints and returns the samples."""
    leak, samples = Leak(arguments.leak), list[tuple[float, ...]]()
    print(head(), flush=True)
    begin, steps, over, due = time.monotonic(), 0, 0.0, 0.0
    while over < 1:
        soaking.step()
        steps += 1
        leak(steps)
        seconds = time.monotonic() - begin
        over = max(
            seconds / 60 / arguments.minutes if arguments.minutes else 0.0,
            steps / arguments.steps if arguments.steps else 0.0,
        )
        if over >= due:
            due = over + 1 / SAMPLES
            faulthandler.dump_traceback_later(5 * PATIENCE, exit=True)
            soaking.rest()
            samples.append(sample())
            print(line(time.monotonic() - begin, steps, samples[-1]), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if something grew."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    logging.getLogger("pipert").setLevel(logging.CRITICAL)  # it would log each killed worker
    print(
        f"pipert {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"devices {' '.join(arguments.devices)}, seed {arguments.seed}",
        end="\n\n",
    )
    faulthandler.dump_traceback_later(5 * PATIENCE, exit=True)
    first = Soak(arguments.devices, arguments.seed)
    first.warm_up()
    first.close()
    del first
    freeze()  # leaves out what torch and Python make only for the first step of each kind
    soaking = Soak(arguments.devices, arguments.seed)
    soaking.warm_up()
    samples = soak(soaking, arguments)
    soaking.close()
    print("", *(f"{count} x {kind}" for kind, count in soaking.done.most_common()), sep="\n")
    if len(samples) < 8:
        print("\nToo few samples to tell whether anything grows.")
        return 1
    grown = growth(samples)
    print("", *([f"GREW: {what}" for what in grown] or ["Nothing grew."]), sep="\n")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
