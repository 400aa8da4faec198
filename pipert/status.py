"""What a pipe says about itself: frozen values, made when asked for.

They hold words and numbers, no tensors and no thread, and may be kept, compared and sent anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Statistics", "TaskStatus", "WorkerStatistics"]

WAITING = "waiting for input"


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """What a worker is at, at one moment."""

    run: int
    """The number of the call it belongs to, counted from 0."""
    phase: str
    """``'forward'`` or ``'waiting for input'``; in a step of ``forward_backward`` also
    ``'recomputation'`` or ``'backward'``."""
    partition: int
    micro_batch: int
    seconds: float
    """For how long."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One worker. What ``loss.backward()`` does is on autograd's threads, and not part of it."""

    name: str
    """Of its thread, ``pipert-<device>-<n>``."""
    device: torch.device
    tasks: int
    """That it has completed, failed ones included: forward tasks, and those of
    ``forward_backward`` of every kind."""
    busy_seconds: float
    """What they took on the worker, and the one it is at so far. Waiting for input is not in it. On
    CUDA a task is over when its kernels are queued."""
    queue_depth: int
    """Tasks in its in-queue, approximately."""
    doing: TaskStatus | None
    """``None`` when it is idle."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """One pipe, in this process, since it was made.

    A call whose arguments are refused is not a run.
    """

    runs: int
    """Calls that were begun."""
    in_flight: int
    """Of these, how many are not over."""
    succeeded: int
    """How many have computed their outputs."""
    failures: int
    """How many raised what a layer had raised, or :class:`WorkerDiedError`."""
    cancellations: int
    """How many were interrupted, timed out, or met the end of the pipe."""
    recomputations: int
    """Tasks ``R[i,j]`` that were begun."""
    workers: tuple[WorkerStatistics, ...]

    @property
    def tasks(self) -> int:
        """Tasks that workers have completed."""
        return sum(worker.tasks for worker in self.workers)
