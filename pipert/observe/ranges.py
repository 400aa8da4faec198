"""Shows tasks in profilers: ranges named ``F[3,1]`` and ``R[3,1]``, marks named ``B[3,1]``.

``torch.profiler`` gets them through ``record_function``, and Nsight Systems through NVTX. They are
made for runs that begin while ``torch.profiler`` is on, under Nsight Systems, or inside
``pipe.record()``.

A forward and a recomputation are functions of pipert, with a range around them. A backward is a
sequence of autograd nodes, each with a range of torch's. A range for the whole backward would begin
inside the first of these and end inside the last, and ranges that overlap without being nested are
drawn wrong. So a mark shows where it begins.

By default ``torch.profiler`` sees only the thread that started it. It sees workers with
``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``; where that
is missing, the log says so once.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import torch
from torch.autograd.profiler import record_function

from pipert._torch import profiler_is_on, profiles_this_thread

_log = logging.getLogger("pipert")

_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ

_has_advised: list[bool] = []  # not empty once the advice was logged


def is_profiled() -> bool:
    """Return whether any profiler would see ranges made now."""
    if _UNDER_NSIGHT:
        return True
    if not profiler_is_on():  # in the process
        return False
    if profiles_this_thread() and not _has_advised:  # in this thread only
        _has_advised.append(True)
        _log.warning(
            "torch.profiler sees the thread that started it alone, and not the workers of a pipe; "
            "profile(experimental_config=torch._C._profiler._ExperimentalConfig("
            "profile_all_threads=True)) sees all"
        )
    return True


@contextlib.contextmanager
def task_range(name: str, device: torch.device) -> Iterator[None]:
    """Show what is done inside as the task called ``name``."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with record_function(name):
            yield
    finally:
        if on_cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def mark(name: str, device: torch.device) -> None:
    """Mark the beginning of the task called ``name``."""
    with record_function(name):
        if device.type == "cuda":
            torch.cuda.nvtx.mark(name)  # type: ignore[no-untyped-call]
