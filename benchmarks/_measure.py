"""Measures both products alternately, and prints tables of medians.

Other work on the machine distorts every absolute time, sometimes by factors. So the products run
in one process and alternate call by call, swapping their order in each round, and the ratio of the
two medians counts. A bar missed under ``--check`` is measured again, up to ``ATTEMPTS`` times in
all, and the output says so each time.

PyTorch computes with one intra-op thread, on every thread of both products: on layers this small a
second one adds only noise, and costs torchgpipe most, which makes new threads in each call.

Depending on what else is in a thread's arena, glibc now and then returns freed memory to the system
and faults it in again. So it is set to keep freed memory, as the allocator of a GPU does.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import TypeVar

import torch
from torch import nn

from pipert import Pipe, __version__

try:
    from torchgpipe import GPipe
except ImportError:
    raise SystemExit(
        "The benchmarks compare pipert with torchgpipe 0.0.7, which is not installed.\n"
        "Install it with: pip install torchgpipe==0.0.7"
    ) from None

__all__ = [
    "ATTEMPTS", "Row", "both", "cell", "header", "medians", "report", "rows", "start",
    "take_turns", "verdict",
]  # fmt: skip

ATTEMPTS = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of a table, and messages about the bars that it missed."""

    cells: tuple[str, ...]
    missed: tuple[str, ...] = ()


def start(
    argv: Sequence[str] | None, description: str | None, *, devices: str | None = None
) -> argparse.Namespace:
    """Reads ``--check``, ``--short`` and ``--slack``, sets one thread, and prints the header.

    With ``devices``, it also reads ``--devices``, whose default that is, as a list of names.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--short", action="store_true", help="fewer repeats, for CI")
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies the bars of times")
    if devices is not None:
        parser.add_argument("--devices", default=devices, help="such as cuda:0,cuda:0")
    arguments = parser.parse_args(argv)
    if devices is not None:
        arguments.devices = arguments.devices.split(",")
    if argv is None:
        one_thread_everywhere()
    torch.set_num_threads(1)
    _keep_memory()
    print(header(), end="\n\n")
    return arguments


def one_thread_everywhere() -> None:
    """Restarts this program if the threads that it makes would have several intra-op threads.

    ``torch.set_num_threads`` sets the current thread only; torchgpipe makes new ones in each call.
    """
    if os.environ.get(_THREADS) != "1":
        sys.stdout.flush()
        os.environ[_THREADS] = "1"
        os.execv(sys.executable, sys.orig_argv)


_THREADS = "OMP_NUM_THREADS"


def _keep_memory() -> None:
    """Makes the C library keep freed memory, if it is glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of malloc.h
    settings = {trim_threshold: 1 << 30, top_pad: 4 << 20, mmap_threshold: 32 << 20}
    for setting, value in settings.items():
        if ctypes.CDLL(None).mallopt(setting, value) != 1:
            raise RuntimeError(f"glibc refuses to set {setting} of malloc to {value}")


def header() -> str:
    """Describes the versions and the hardware that the figures were measured with."""
    return (
        f"pipert {__version__}, torchgpipe {version('torchgpipe')}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} intra-op thread"
    )


@contextmanager
def both(
    build: Callable[[], nn.Sequential], n: int, *, chunks: int, checkpoint: str
) -> Iterator[dict[str, nn.Module]]:
    """Yields the two products over equal modules, one layer in each of ``n`` partitions on CPU."""
    devices = ["cpu"] * n
    peer = GPipe(build(), [1] * n, devices=devices, chunks=chunks, checkpoint=checkpoint)
    ours = Pipe(build(), [1] * n, devices=devices, chunks=chunks, checkpoint=checkpoint)
    with closing(ours):
        yield {"pipert": ours, "torchgpipe": peer}


def take_turns(
    measure: Callable[[str], T], names: Sequence[str], *, repeats: int, warm_up: int = 2
) -> dict[str, list[T]]:
    """Calls ``measure(name)`` for each name in turn; collects the results of ``repeats`` rounds."""
    for _ in range(warm_up):
        for name in names:
            measure(name)
    rounds = []
    for k in range(repeats):
        order = names if k % 2 else tuple(reversed(names))
        rounds.append({name: measure(name) for name in order})
    return {name: [results[name] for results in rounds] for name in names}


def medians(samples: Sequence[Sequence[float]]) -> list[float]:
    """Returns the median of each column of ``samples``."""
    return [median(column) for column in zip(*samples, strict=True)]


def rows(measure: Callable[[], list[Row]], *, check: bool) -> list[Row]:
    """Measures the rows of a case; under ``--check``, again if it misses a bar."""
    measured = measure()
    for attempt in range(2, ATTEMPTS + 1):
        missed = [line for row in measured for line in row.missed]
        if not (check and missed):
            break
        print(f"Measuring again ({attempt} of {ATTEMPTS}), noise or not: {'; '.join(missed)}")
        measured = measure()
    return measured


def cell(value: float | None, digits: int) -> str:
    """Formats a cell of a table; ``None`` as a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def report(title: str, columns: Sequence[str], table: Sequence[Row]) -> list[str]:
    """Prints an aligned Markdown table, and returns the bars that it missed, for ``verdict``."""
    cells = [tuple(columns), *(row.cells for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    ruler = tuple("-" * width for width in widths)
    print(f"{title}\n")
    for line in (cells[0], ruler, *cells[1:]):
        first, *rest = zip(line, widths, strict=True)
        print(f"| {first[0]:<{first[1]}} |", *(f"{cell:>{width}} |" for cell, width in rest))
    print()
    return [line for row in table for line in row.missed]


def verdict(
    missed: Sequence[str], *, check: bool, reports: Sequence[object] | None = None
) -> int:
    """Prints the verdict on all tables of a benchmark, below them, and returns the exit status.

    Args:
        missed: the bars that any of the tables missed.
        check: whether a missed bar is a failure.
        reports: reports of missing waits, each a failure even without ``check``; ``None`` if the
            benchmark does not look for them.
    """
    if reports is not None:
        print(f"Missing waits: {len(reports)} reports.", *reports[:10], sep="\n")
    print(*([f"MISSED: {line}" for line in missed] or ["Every bar held."]), sep="\n")
    return int(bool(reports) or (check and bool(missed)))
