"""Defines what is told of a pipe's activity: frozen values.

They hold strings and numbers, no tensors and no threads, so they can be kept, compared and sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["Statistics", "TaskInfo", "WorkerStatistics"]

WAITING = "waiting for input"


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """Identifies a task: ``F[i,j]`` or ``R[i,j]``, in a step also ``B[i,j]`` and ``W[i,j]``."""

    run: int
    """The number of the call, counted from 0 for each pipe."""
    phase: str
    """``'forward'``, ``'recomputation'``, ``'backward'`` or ``'weight gradient'``; of a worker also
    ``'waiting for input'``."""
    partition: int
    micro_batch: int
    device: torch.device
    seconds: float = 0.0
    """Of a worker's task, the seconds it has taken so far."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """The work of one worker. It excludes ``loss.backward()``, which autograd's threads run."""

    name: str
    """The name of its thread, ``pipert-<device>-<n>``."""
    device: torch.device
    tasks: int
    """Completed tasks, failed ones included: forward tasks, and every kind of task of
    ``forward_backward``."""
    busy_seconds: float
    """The time spent on completed tasks and on the current one so far, without waiting for input.
    On CUDA a task is over when its kernels are queued."""
    queue_depth: int
    """The approximate number of tasks in its in-queue."""
    doing: TaskInfo | None
    """The current task; ``None`` if idle."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The calls of one pipe since it was made; a forked process goes on from its parent's counts.

    A call whose arguments are refused does not count.
    """

    runs: int
    """Calls started."""
    in_flight: int
    """Calls not yet over."""
    succeeded: int
    """Calls that computed their outputs."""
    failures: int
    """Calls that raised an error of a layer, or :class:`WorkerDiedError`."""
    cancellations: int
    """Calls that were interrupted, timed out, or were ended by closing the pipe."""
    recomputations: int
    """Tasks ``R[i,j]`` started."""
    workers: tuple[WorkerStatistics, ...]

    def __str__(self) -> str:
        """Return the counts and, if there are workers, a table of them."""
        counts = (
            f"{self.runs} calls: {self.succeeded} succeeded, {self.failures} failed, "
            f"{self.cancellations} cancelled, {self.in_flight} in flight; "
            f"{self.recomputations} recomputations"
        )
        return "\n".join([counts, "", *table(self.workers)]) if self.workers else counts


def table(workers: Iterable[WorkerStatistics]) -> list[str]:
    """Return the lines of a table that says what workers are doing, a row each."""
    rows: list[tuple[str, ...]] = [
        ("worker", "partition", "micro-batch", "phase", "for", "call", "waiting", "done", "busy")
    ]
    for worker in workers:
        doing, queued = worker.doing, str(worker.queue_depth)
        now: tuple[str, ...] = ("-", "-", "idle", "-", "-")
        if doing is not None:
            place = (str(doing.partition), str(doing.micro_batch), doing.phase)
            now = (*place, f"{doing.seconds:.3g} s", str(doing.run))
        done = (str(worker.tasks), f"{worker.busy_seconds:.3g} s")
        rows.append((worker.name, *now, queued, *done))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
