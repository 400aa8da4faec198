"""Describes the machine that the checks run on, and makes the settings that they need."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

import pipert
from pipert.check.finding import Measurement
from pipert.check.ways import Devices

__all__: list[str] = []

UNKNOWN = "unknown"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it at its first use
_LIMIT = 600  # seconds
_STDERR = 2


def versions() -> dict[str, str]:
    """Returns the versions of all software involved."""
    return {
        "pipert": f"{pipert.__version__}, commit {_commit()}",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),  # type: ignore[no-untyped-call]
        "NVIDIA driver": _driver(),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
        "intra-op threads": str(torch.get_num_threads()),
    }


def gpus(devices: Devices) -> Measurement | None:
    """Returns the name, memory and peers of each GPU."""
    rows = []
    for device in devices.gpus:
        found = torch.cuda.get_device_properties(device)
        free = torch.cuda.mem_get_info(device)[0]
        peers = [
            str(other) for other in devices.gpus
            if other != device and torch.cuda.can_device_access_peer(device, other)
        ]  # fmt: skip
        rows.append((
            str(device), str(found.name), f"{found.major}.{found.minor}",
            f"{found.total_memory / 2**30:.1f}", f"{free / 2**30:.1f}", ", ".join(peers) or "none",
        ))  # fmt: skip
    columns = ("device", "name", "compute capability", "memory, GiB", "free, GiB", "peer access to")
    return Measurement("GPUs", columns, tuple(rows)) if rows else None


def _commit() -> str:
    """Returns the commit of the checkout that pipert runs from or was installed from."""
    root = Path(pipert.__file__).parents[1]
    if (root / ".git").exists() and shutil.which("git"):
        return _output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        text = importlib.metadata.distribution("pipert").read_text("direct_url.json") or "{}"
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
    commit: str = json.loads(text).get("vcs_info", {}).get("commit_id", UNKNOWN)
    return commit


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    return _output_of("nvidia-smi", *query).partition("\n")[0]


def _output_of(*command: str) -> str:
    """Returns what a program prints; ``'unknown'`` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or UNKNOWN if done.returncode == 0 else UNKNOWN


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search("^model name.*: (.*)", info.read_text() if info.exists() else "", re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


# Settings, restored afterwards -------------------------------------------------------------------


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Selects deterministic kernels where torch has them; torch warns about other kernels."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def settled(devices: Devices) -> Iterator[None]:
    """Disables TF32 and the choice of kernels by timing, and makes cuBLAS deterministic.

    If all devices are CPUs it sets one thread per operation, since otherwise a single device uses
    all cores. After ten minutes it ends the process with status 1, and prints where each thread is.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32, torch.get_num_threads()
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    cudnn.allow_tf32 = cudnn.benchmark = matmul.allow_tf32 = False
    if not devices.gpus:
        torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_LIMIT, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32, threads = before
        torch.set_num_threads(threads)
        if workspace is None:
            del os.environ[_WORKSPACE]
