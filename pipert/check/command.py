"""Runs all checks one after the other and prints the report: ``python -m pipert check``."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch

from pipert.check import errors, links, machine, memory, overlap, repeats, speed, values
from pipert.check.finding import BROKEN, NOT_CHECKED, Finding, Findings, Found
from pipert.check.load import Load, busy, fitting
from pipert.check.models import small_models
from pipert.check.ways import Devices
from pipert.model.devices import parse_devices, where_tensors_are

__all__: list[str] = []

MAX_DEVICES = 16  # for which the smallest model has 17 layers
NO_GPU = "no CUDA device: checking two CPU workers instead; this says nothing about GPUs"
ONE_GPU = "one GPU: copies between GPUs, and GPUs that compute at the same time, cannot be checked"
CRASH_MEANS = "pipert, or torch, raised an error where none should be: the traceback is on stderr"


@dataclass(frozen=True)
class Effort:
    """The sizes and repeat counts of the checks."""

    dtypes: tuple[torch.dtype, ...]
    repeats: int
    steps: int
    """The number of steps over which memory must stay the same."""
    seconds: float
    """The time to spend on measuring speed."""
    width: int
    rows: int
    """The initial number of rows in a micro-batch."""
    grow: bool
    """Whether to add rows until the device is busy."""
    link_bytes: int
    """The size of each copy by torch alone."""


QUICK = Effort(
    dtypes=(torch.float64,), repeats=2, steps=4, seconds=0.0, width=32, rows=64, grow=False,
    link_bytes=1 << 20,
)  # fmt: skip
ON_GPUS = Effort(
    dtypes=(torch.float64, torch.float32), repeats=5, steps=20, seconds=25.0, width=2048, rows=256,
    grow=True, link_bytes=1 << 26,
)  # fmt: skip
ON_CPU = replace(ON_GPUS, seconds=15.0, width=256, rows=32)


def add_parser(tools: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, too")
    parser.add_argument("--quick", action="store_true",
                        help="seconds: small sizes and few repeats; times mean little")  # fmt: skip
    parser.set_defaults(run=lambda arguments: _check(arguments, parser))


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        devices, remarks = _devices(arguments.devices)
    except ValueError as error:
        parser.error(f"--devices: {error}")
    path: Path | None = arguments.json
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        parser.error(f"--json must be a file in a folder that is there, not {path}")
    if arguments.quick:
        effort, remarks = QUICK, [*remarks, "--quick: sizes are small, so times mean little"]
    else:
        # A load that keeps a GPU busy would take a CPU minutes.
        effort = ON_CPU if torch.device("cpu") in devices.partitions else ON_GPUS
    for remark in remarks:
        print(f"pipert check: {remark}", file=sys.stderr)
    with machine.settled(devices):
        findings = run(devices, effort)
        versions = machine.versions()
    print(findings.markdown(devices, versions, remarks))
    if path is not None:
        data = findings.as_json(devices, versions, remarks)
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return 1 if findings.broken else 0


def _devices(names: str | None) -> tuple[Devices, list[str]]:
    """Returns the partitions' devices, and remarks about them.

    Raises:
        ValueError: a device does not exist, or there are too many.
    """
    if names is not None:
        devices = where_tensors_are(parse_devices(name.strip() for name in names.split(",")))
    elif torch.cuda.is_available():
        devices = parse_devices(range(torch.cuda.device_count()))[:MAX_DEVICES]
    else:
        return Devices((torch.device("cpu"),) * 2), [NO_GPU]
    if len(devices) > MAX_DEVICES:
        raise ValueError(f"{len(devices)} are too many; at most {MAX_DEVICES}")
    found = Devices(tuple(devices * 2 if len(devices) == 1 else devices))
    remarks = {0: ["no CUDA device among them: this says nothing about GPUs"], 1: [ONE_GPU]}
    return found, remarks.get(len(found.gpus), [])


def run(devices: Devices, effort: Effort) -> Findings:
    """Run all checks. A check that raises becomes a finding, and the next one runs."""
    findings, n = Findings(), devices.n
    gpus = machine.gpus(devices)
    if gpus is not None:
        findings.add(gpus)
    check = partial(_run, findings)
    check("links", lambda: links.check(devices, effort.link_bytes))
    with machine.deterministic():
        copies = Load(n, 2 * n, 1, effort.width, 4 * effort.rows)
        small = (model for dtype in effort.dtypes for model in small_models(n, dtype))
        check("values", lambda: values.check(devices, small))
        under_load = "chain under load"
        check("values under load", lambda: values.check(devices, [copies.model(under_load)]))
        check("errors of layers", lambda: errors.check(devices))
        check("repeated steps", lambda: repeats.check(devices, effort.repeats, copies))
    layers = memory.load_for_memory(n, min(256, effort.width), 16 * effort.rows)
    check("memory", lambda: memory.check(devices, fitting(layers, devices), effort.steps))
    check("copies", lambda: overlap.check_copies(devices))

    @cache
    def load() -> Load:
        small = Load(n, 4 * n, 4, effort.width, effort.rows)
        return busy(small, devices) if effort.grow else small

    check("overlap", lambda: overlap.check(devices, load()))
    check("speed", lambda: speed.check(devices, load(), effort.seconds))
    return findings


def _run(findings: Findings, name: str, check: Callable[[], Iterable[Found]]) -> None:
    """Collect what ``check`` finds, and report progress on stderr."""
    started = perf_counter()
    print(f"pipert check: {name} ...", file=sys.stderr, flush=True)
    try:
        for found in check():
            findings.add(found)
            if isinstance(found, Finding):
                seconds = perf_counter() - started
                print(f"  {found.check}: {found.outcome} ({seconds:.1f} s)", file=sys.stderr)
    except torch.OutOfMemoryError as error:
        reason = f"out of memory: {str(error).partition('.')[0]}"
        findings.add(Finding(name, NOT_CHECKED, reason))
    except Exception as error:  # the other checks are still worth running
        traceback.print_exc()
        seen = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        findings.add(Finding(name, BROKEN, seen, CRASH_MEANS))
