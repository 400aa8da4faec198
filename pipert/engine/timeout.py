"""Time limits: what is said when one is over, and what is left behind then.

A layer that is executing cannot be interrupted, so a call that gives up leaves tasks behind. Those
that have not begun do not begin any more; the one that is executing goes on, to the end of its
partition. Until then its worker serves nobody, and calls say so at once instead of waiting behind
it (**R6**).

What is remembered of a run that was given up is whether it is settled. It holds no tensors (**R5**)
but what the executing layer itself holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from pipert.errors import PipelineTimeout, WorkerBusyError
from pipert.stage.outcome import Outcome
from pipert.status import WorkerStatistics

__all__: list[str] = []


class GivenUp:
    """The runs of one pipe that were given up and are not settled. Any thread."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[Outcome, tuple[int, int]] = {}  # its operations are atomic

    def add(self, outcome: Outcome, number: int) -> None:
        """The run was given up."""
        self._runs[outcome] = os.getpid(), number

    def is_empty(self) -> bool:
        """Whether all of them are settled by now."""
        for outcome, (pid, _) in list(self._runs.items()):
            if outcome.is_settled() or pid != os.getpid():
                self._runs.pop(outcome, None)
        return not self._runs

    def busy(self, workers: Iterable[WorkerStatistics]) -> list[WorkerStatistics]:
        """Those that are executing a task of one of them.

        A task that is queued, behind the healthy task of another call, is no reason to refuse any.
        """
        numbers = {number for _, number in list(self._runs.values())}
        return [w for w in workers if w.doing is not None and w.doing.run in numbers]

    def __repr__(self) -> str:
        return f"<GivenUp: {len(self._runs)} runs>"


def timed_out(
    what: str, seconds: float, workers: Iterable[WorkerStatistics], stacks: Mapping[str, str]
) -> PipelineTimeout:
    """The error for what took too long.

    Args:
        what: took longer.
        seconds: than these.
        workers: all of the pipe, as they were.
        stacks: by the name of the worker, for those that are executing.
    """
    workers = tuple(workers)
    lines = [f"{what} after {seconds:g} s. What the workers were doing:", "", *_table(workers)]
    for name, stack in stacks.items():
        lines += ["", f"{name} was at (most recent call last):", stack.rstrip()]
    error = PipelineTimeout("\n".join(lines))
    error.workers = workers
    return error


def still_busy(busy: Sequence[WorkerStatistics]) -> WorkerBusyError:
    """The error for a call that would wait behind what was given up, which these are busy with."""
    names = ", ".join(worker.name for worker in busy)
    text = (
        f"{names} still busy with a call that was given up; a layer cannot be interrupted. Calls "
        "work again when it has returned. What the workers are doing:"
    )
    error = WorkerBusyError("\n".join([text, "", *_table(busy)]))
    error.workers = tuple(busy)
    return error


def _table(workers: Iterable[WorkerStatistics]) -> list[str]:
    rows = [("worker", "partition", "micro-batch", "phase", "for", "call", "tasks waiting")]
    for worker in workers:
        doing, queued = worker.doing, str(worker.queue_depth)
        if doing is None:
            rows.append((worker.name, "-", "-", "idle", "-", "-", queued))
            continue
        place = (str(doing.partition), str(doing.micro_batch), doing.phase)
        rows.append((worker.name, *place, f"{doing.seconds:.3g} s", str(doing.run), queued))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
