"""Runs all checks one after the other and prints the report: ``python -m pipert check``."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipert.check import machine, memory, overlap, peers, speed, values
from pipert.check.finding import BROKEN, NOT_CHECKED, Finding
from pipert.check.models import chain, transformer
from pipert.check.ways import Devices
from pipert.model.devices import parse_devices, where_tensors_are

__all__: list[str] = []

NO_GPU = "no CUDA device: checking CPU workers instead; this says nothing about GPUs"
ONE_GPU = "one GPU: copies between GPUs, and GPUs that compute at the same time, cannot be checked"
CRASH_MEANS = "pipert, or torch, raised an error where none should be: the traceback is on stderr"


@dataclass(frozen=True)
class Effort:
    """The sizes and repeat counts of the checks."""

    dtypes: tuple[torch.dtype, ...]
    repeats: int
    """The number of steps from one seed, and of measurements; memory takes four times as many."""
    width: int
    """Of the layers of the chain."""
    rows: int
    """Of a micro-batch of the chain."""


QUICK = Effort(dtypes=(torch.float64,), repeats=2, width=32, rows=64)
ON_GPUS = Effort(dtypes=(torch.float64, torch.float32), repeats=6, width=4096, rows=512)
ON_CPU = replace(ON_GPUS, width=256, rows=256)  # what keeps a GPU busy would take a CPU minutes


def add_parser(tools: Any) -> None:
    """Add ``check`` to the tools of ``python -m pipert``."""
    parser = tools.add_parser(
        "check",
        help="check pipert on the devices of this machine",
        description="Compare pipes with plain modules on the devices of this machine, read memory,"
        " look at what overlaps, measure the speed-up, and print a report in Markdown. Takes up to"
        " two minutes. Exit status 1 if something does not hold.",
    )
    parser.add_argument("--devices", help="of the partitions, such as cuda:0,cuda:1,cpu (default:"
                        " the GPUs that are there; without any, two CPU workers)")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="seconds: small sizes and few repeats; times mean little")  # fmt: skip
    parser.set_defaults(run=lambda arguments: _check(arguments, parser))


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        devices = _devices(arguments.devices)
    except (ValueError, RuntimeError) as error:  # torch raises the latter
        parser.error(f"--devices: {error}")
    effort = ON_CPU if torch.device("cpu") in devices.partitions else ON_GPUS
    remarks = {0: [NO_GPU], 1: [ONE_GPU]}.get(len(devices.gpus), [])
    if arguments.quick:
        effort, remarks = QUICK, [*remarks, "--quick: sizes are small, so times mean little"]
    machine.settle(devices)
    lines = [*machine.description(devices), *remarks]
    print("## pipert check", "", *[f"* {line}" for line in lines], "", sep="\n")
    broken = 0
    for finding in run(devices, effort):
        print(finding, flush=True)
        broken += finding.outcome == BROKEN
    print("", f"{broken or 'No'} check{'s' * (broken != 1)} failed.", sep="\n")
    return 1 if broken else 0


def _devices(names: str | None) -> Devices:
    """Returns the partitions' devices; a single one has two partitions.

    Raises:
        ValueError: a device does not exist.
    """
    if names is not None:
        devices = where_tensors_are(parse_devices(name.strip() for name in names.split(",")))
    else:
        devices = parse_devices(range(torch.cuda.device_count())) or [torch.device("cpu")]
    return Devices(tuple(devices * 2 if len(devices) == 1 else devices))


def run(devices: Devices, effort: Effort) -> Iterator[Finding]:
    """Run all checks. A check that raises becomes a finding, and the next one runs."""
    n = devices.n
    yield from _found("copies by torch alone", lambda: peers.check(devices))
    # Whose copies take as long as its layers.
    copies = replace(chain(n, 2 * n, 1, effort.width, effort.rows), name="chain under load")
    cases = [*(transformer(n, dtype) for dtype in effort.dtypes), copies]
    torch.set_deterministic_debug_mode("warn")  # torch warns of kernels that are not
    yield from _found("values", lambda: values.check(devices, cases))
    yield from _found("repeats", lambda: values.check_repeats(devices, effort.repeats, copies))
    torch.set_deterministic_debug_mode("default")
    layers = chain(n, max(8, 2 * n), 8, min(256, effort.width), 8 * effort.rows)
    yield from _found("memory", lambda: memory.check(devices, layers, 4 * effort.repeats))
    load = chain(n, max(8, 2 * n), 4, effort.width, effort.rows)
    yield from _found("overlap", lambda: overlap.check(devices, load))
    yield from _found("speed", lambda: speed.check(devices, load, effort.repeats))


def _found(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields what ``check`` finds, and an error as a finding."""
    try:
        yield from check()
    except torch.OutOfMemoryError as error:
        yield Finding(name, NOT_CHECKED, f"out of memory: {str(error).partition('.')[0]}")
    except Exception as error:  # the other checks are still worth running
        traceback.print_exc()
        seen = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Finding(name, BROKEN, seen, CRASH_MEANS)
