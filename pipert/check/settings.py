"""Settings of torch and the process during the checks, restored afterwards."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator

import torch

from pipert.check.ways import Devices

__all__: list[str] = []

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it at its first use
_LIMIT = 600  # seconds
_STDERR = 2


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Selects deterministic kernels as far as torch has them; it warns about others."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def settled(devices: Devices) -> Iterator[None]:
    """Disables TF32 and choosing kernels by timing, and makes cuBLAS deterministic.

    On CPUs alone it sets one thread per operation; otherwise a single device uses all cores. After
    ten minutes it ends the process with status 1, and says where each thread is.
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
