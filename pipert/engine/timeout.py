"""Builds the errors of time limits, and of calls made while what was given up still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipert.errors import PipelineTimeout, WorkerBusyError
from pipert.status import WAITING, WorkerStatistics, table

__all__: list[str] = []


def timed_out(
    what: str, seconds: float, workers: Sequence[WorkerStatistics], stack: Callable[[int], str]
) -> PipelineTimeout:
    """Build the error that ``what`` took too long, with the ``stack`` of each executing worker."""
    lines = [f"{what} after {seconds:g} s. What the workers were doing:", "", *table(workers)]
    for k, worker in enumerate(workers):
        if worker.doing is not None and worker.doing.phase != WAITING:
            lines += ["", f"{worker.name} was at (most recent call last):", stack(k).rstrip()]
    error = PipelineTimeout("\n".join(lines))
    error.workers = tuple(workers)
    return error


def still_busy(busy: Sequence[WorkerStatistics]) -> WorkerBusyError:
    """Build the error of a call that would wait for workers ``busy`` with what was given up."""
    names = ", ".join(worker.name for worker in busy)
    text = (
        f"{names} still busy with a call that was given up; a layer cannot be interrupted. Calls "
        "work again when it has returned. What the workers are doing:"
    )
    error = WorkerBusyError("\n".join([text, "", *table(busy)]))
    error.workers = tuple(busy)
    return error
