"""Describes the machine that the checks run on, and makes the settings that they need."""

from __future__ import annotations

import faulthandler
import os
import platform

import torch
from torch.utils import collect_env

import pipert
from pipert.check.ways import Devices

__all__: list[str] = []

_LIMIT = 600  # seconds
_STDERR = 2


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
    faulthandler.dump_traceback_later(_LIMIT, exit=True, file=_STDERR)
