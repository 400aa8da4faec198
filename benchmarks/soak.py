"""Takes thousands of random steps in one process: each must be right, and nothing may grow.

Models and steps are those of the random tester (``tests/fuzz``), with up to forty steps in a pipe:
every kind of layer, schedule and mode, two threads at once, layers that raise in a forward or in a
backward. Each case is compared with the plain module.

At rest, between cases, the resources of the process are measured (see ``_usage.py``); the table
shows them. The exit code is 1 if something grew; a wrong case ends with a traceback. ``--leak``
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _usage import collect, freeze, growth, head, line, sample

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests is

from pipert import __version__  # noqa: E402
from tests.fuzz.case import Case, draw  # noqa: E402
from tests.fuzz.check import check  # noqa: E402

__all__ = ["main"]

SAMPLES = 40
PATIENCE = 300.0  # seconds, after which a case hangs
STEPS = 40  # of a case, at most
WARM_UP = 40  # cases, which make what torch and Python make only once


class Leak:
    """The leak that ``--leak`` asks for; called after each case."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind
        self.kept: list[Any] = []
        self.never = threading.Event()

    def __call__(self) -> None:
        if self.kind == "threads":
            threading.Thread(target=self.never.wait, daemon=True).start()
        elif self.kind == "tensors":
            self.kept.append(torch.zeros(1))
        elif self.kind == "objects":
            self.kept += [[] for _ in range(100)]
        elif self.kind == "memory":
            self.kept.append(bytearray(1 << 18))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--short", action="store_true", help="twenty seconds, for CI")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", choices=("threads", "tensors", "objects", "memory"))
    arguments = parser.parse_args(argv)
    if arguments.short:
        arguments.minutes = 1 / 3
    return arguments


def case_of(seed: int, number: int, places: Sequence[str]) -> Case:
    """Draws a case.

    Under autocast a long training goes another way after a few steps, as rounding has it.
    """
    case = draw(seed, number, places, STEPS)
    return replace(case, steps=case.steps[:4]) if case.autocast else case


def soak(arguments: argparse.Namespace, places: Sequence[str]) -> list[tuple[float, ...]]:
    """Checks cases until the time is over; prints and returns the samples."""
    leak, samples = Leak(arguments.leak), list[tuple[float, ...]]()
    print(head(), flush=True)
    begin, cases, steps, due = time.monotonic(), 0, 0, 0.0
    while (over := (time.monotonic() - begin) / 60 / arguments.minutes) < 1:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        case = case_of(arguments.seed, WARM_UP + cases, places)
        check(case)
        leak()
        cases, steps = cases + 1, steps + len(case.steps)
        if over >= due:
            due = over + 1 / SAMPLES
            collect()  # an error and the frames that refer to it are cycles, which keep pipes alive
            samples.append(sample())
            print(line(time.monotonic() - begin, steps, samples[-1]), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if something grew."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    logging.getLogger("pipert").setLevel(logging.CRITICAL)
    count = min(4, torch.cuda.device_count())
    places = (*[f"cuda:{k}" for k in range(count)], "cpu")
    print(
        f"pipert {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"devices {' '.join(places)}, seed {arguments.seed}",
        end="\n\n",
    )
    for number in range(WARM_UP):
        check(case_of(arguments.seed, number, places))
    freeze()
    grown = growth(soak(arguments, places))
    print("", *([f"GREW: {what}" for what in grown] or ["Nothing grew."]), sep="\n")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
