"""Tasks as profilers show them: ranges named ``F[3,1]`` and ``R[3,1]``, marks named ``B[3,1]``.

``torch.profiler`` gets them through ``record_function``, and Nsight Systems through NVTX. They are
made for runs that begin while ``torch.profiler`` is on, under Nsight Systems, or inside of
``pipe.record()``.

A forward and a recomputation are functions of ours, with a range around them. A backward is a
sequence of autograd's nodes, each of which has a range of torch's: one of ours would begin inside
of the first and end inside of the last, and ranges that overlap without being nested are drawn
wrong. So there is a mark where it begins.

By default ``torch.profiler`` sees the thread that started it alone. Workers are seen with
``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``, which the
log says once to those who did not.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import torch
from torch._C._profiler import _RecordFunctionFast

__all__: list[str] = []

_log = logging.getLogger("pipert")

_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ

_told: list[bool] = []  # not empty when the advice was given


def profiler_looks() -> bool:
    """Whether ranges made now would be seen by anybody."""
    if _UNDER_NSIGHT:
        return True
    if not torch.autograd.profiler._is_profiler_enabled:  # of the process; a look costs 50 ns
        return False
    if torch._C._autograd._profiler_enabled() and not _told:  # of this thread alone
        _told.append(True)
        _log.warning(
            "torch.profiler sees the thread that started it alone, and not the workers of a pipe; "
            "profile(experimental_config=torch._C._profiler._ExperimentalConfig("
            "profile_all_threads=True)) sees all"
        )
    return True


@contextlib.contextmanager
def task_range(name: str, device: torch.device) -> Iterator[None]:
    """What is done inside belongs to the task called ``name``."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with _RecordFunctionFast(name):
            yield
    finally:
        if on_cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def mark(name: str, device: torch.device) -> None:
    """The task called ``name`` begins here."""
    with _RecordFunctionFast(name):
        if device.type == "cuda":
            torch.cuda.nvtx.mark(name)  # type: ignore[no-untyped-call]
