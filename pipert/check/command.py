"""Runs all checks one after the other and prints the report: ``python -m pipert check``."""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import collect_env

import pipert
from pipert.check import checks
from pipert.check.ways import BROKEN, NOT_CHECKED, Devices, Finding, chain, transformer
from pipert.model.devices import parse_devices, where_tensors_are

NO_GPU = "no CUDA device: checking CPU workers instead; this says nothing about GPUs"
ONE_GPU = "one GPU: copies between GPUs, and GPUs that compute at the same time, cannot be checked"
CRASH_MEANS = "pipert, or torch, raised an error where none should be: the traceback is on stderr"
LIMIT = 600  # seconds


class Effort(NamedTuple):
    """The sizes and repeat counts of the checks."""

    dtypes: tuple[torch.dtype, ...]
    repeats: int  # steps from one seed, and measurements; memory takes four times as many
    width: int  # of the layers of the chain
    rows: int  # of a micro-batch of the chain


QUICK = Effort((torch.float64,), repeats=2, width=32, rows=64)
ON_GPUS = Effort((torch.float64, torch.float32), repeats=6, width=4096, rows=512)
ON_CPU = ON_GPUS._replace(width=256, rows=256)  # what keeps a GPU busy would take a CPU minutes


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
    settle(devices)
    lines = [*description(devices), *remarks]
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


def description(devices: Devices) -> list[str]:
    """Returns lines about the software, and about each device."""
    driver = collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]
    lines = [
        f"pipert {pipert.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"NVIDIA driver {driver}, Python {platform.python_version()}",
        f"{platform.platform()}, {os.cpu_count()} cores",
        f"partitions on {', '.join(map(str, devices.partitions))}",
    ]
    for device in devices.gpus:
        found = torch.cuda.get_device_properties(device)
        free = torch.cuda.mem_get_info(device)[0]
        peers = [
            str(other) for other in devices.gpus
            if other != device and torch.cuda.can_device_access_peer(device, other)
        ]  # fmt: skip
        lines.append(
            f"{device}: {found.name}, {free / 2**30:.1f} of {found.total_memory / 2**30:.1f} GiB "
            f"free, peer access to {', '.join(peers) or 'none'}"
        )
    return lines


def settle(devices: Devices) -> None:
    """Makes the settings of this process, which only runs the checks.

    No TF32, no choice of kernels by timing, deterministic cuBLAS, and attention by plain kernels.
    If all devices are CPUs, one thread per operation: otherwise one device uses all cores. After
    ten minutes the process ends with status 1, and prints where each thread is.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    cudnn.allow_tf32 = cudnn.benchmark = cuda.matmul.allow_tf32 = False
    for enable in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp):
        enable(False)
    if not devices.gpus:
        torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)


def run(devices: Devices, effort: Effort) -> Iterator[Finding]:
    """Run all checks. A check that raises becomes a finding, and the next one runs."""
    n, width, rows = devices.n, effort.width, effort.rows
    yield from _found("copies by torch alone", checks.check_copies, devices)
    # Whose copies take as long as its layers.
    copies = chain(n, 2 * n, 1, width, rows)._replace(name="chain under load")
    cases = [*(transformer(n, dtype) for dtype in effort.dtypes), copies]
    torch.set_deterministic_debug_mode("warn")  # torch warns of kernels that are not
    yield from _found("values", checks.check_values, devices, cases)
    yield from _found("repeats", checks.check_repeats, devices, effort.repeats, copies)
    torch.set_deterministic_debug_mode("default")
    layers = chain(n, max(8, 2 * n), 8, min(256, width), 8 * rows)
    yield from _found("memory", checks.check_memory, devices, layers, 4 * effort.repeats)
    load = chain(n, max(8, 2 * n), 4, width, rows)
    yield from _found("overlap", checks.check_overlap, devices, load)
    yield from _found("speed", checks.check_speed, devices, load, effort.repeats)


def _found(name: str, check: Callable[..., Iterable[Finding]], *args: Any) -> Iterator[Finding]:
    """Yields what ``check`` finds, and an error as a finding."""
    try:
        yield from check(*args)
    except torch.OutOfMemoryError as error:
        yield Finding(name, NOT_CHECKED, f"out of memory: {str(error).partition('.')[0]}")
    except Exception as error:  # the other checks are still worth running
        traceback.print_exc()
        seen = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Finding(name, BROKEN, seen, CRASH_MEANS)
