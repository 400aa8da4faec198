"""Waits for a run until nothing of it is queued or executing, whatever happens meanwhile.

Guarantees:

* **R2** when :meth:`Waiting.execute` returns, raises or is interrupted, no task of the run is
  queued or executing, except what a run that was given up leaves behind.
* **R6** every wait notices a dead worker: its tasks are abandoned, and an abandoned task sends what
  its successor waits for. A worker killed half-way through that is detected by polling.

A layer that is executing cannot be interrupted, so a call that times out leaves tasks behind. Those
that have not begun never do; the one that is executing goes on to the end of its partition. Until
then its worker serves nobody, and calls say so at once instead of waiting behind it. Of the run
only its outcome is remembered; no tensors are held (**R5**) except by the executing layer itself.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from pipert.engine.clock import Posting
from pipert.errors import (
    PipeClosedError,
    PipelineTimeout,
    PipertError,
    ReentrantCallError,
    WorkerBusyError,
    WorkerDiedError,
)
from pipert.stage.run import Outcome, Run
from pipert.status import WAITING, TaskInfo, WorkerStatistics, table
from pipert.workers.pool import Pool
from pipert.workers.worker import CHECK, WorkerThread

_log = logging.getLogger("pipert")

_RECHECK = 0.02  # s; and, if a worker is dead, whether the others are done with the run


@dataclass(slots=True, eq=False)
class Waiting:
    """The part of a pipe that waits for its runs. Thread-safe."""

    _pool: Pool
    _clock: int
    """The index of the clock among the pool's threads: the last, after the workers."""
    _given_up: dict[Outcome, tuple[int, int]] = field(default_factory=dict)
    """The process and the number of each run that was given up and is not settled."""

    def threads(self) -> list[WorkerThread]:
        """Return the threads, started if necessary.

        Raises:
            PipeClosedError: the pipe was closed.
            WorkerBusyError: a layer of a call that was given up has not returned.
        """
        threads = self._pool.start()
        busy = self.stuck()
        if busy:
            raise still_busy(busy)
        return threads

    def workers(self) -> tuple[WorkerStatistics, ...]:
        """Return what each worker is doing."""
        return tuple(self._pool.statistics()[: self._clock])

    def stuck(self) -> list[WorkerStatistics]:
        """Return the workers that are executing a task of a call that was given up.

        Such a task that is only queued, behind another call's healthy task, does not matter.
        """
        if not self._given_up:
            return []
        for outcome, (pid, _) in list(self._given_up.items()):
            if outcome.is_settled() or pid != os.getpid():
                self._given_up.pop(outcome, None)
        numbers = {number for _, number in list(self._given_up.values())}
        workers = self.workers() if numbers else ()
        return [w for w in workers if w.doing is not None and w.doing.run in numbers]

    def post(self, posting: Posting) -> None:
        """Let the clock post a run, which :meth:`execute` must follow."""
        self._pool.put(self._clock, posting)

    def execute(
        self, run: Run, posting: Posting, threads: list[WorkerThread], timeout: float | None
    ) -> None:
        """Post the run and wait for it."""
        try:
            self.post(posting)  # once, if it was posted before
            if self._wait(run, posting, threads, timeout):
                return
            error: PipertError | None = _deadlock(threads)
            error = error or self.timed_out("a call of the pipe was not over", timeout)
            self._give_up(run, posting)
        except BaseException:
            try:
                self._call_off(run, posting, threads, timeout)
            except BaseException:  # noqa: B036  the first interrupt is being raised
                self._call_off(run, posting, threads, 0.0)
            raise
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait(
        self, run: Run, posting: Posting, threads: list[WorkerThread], timeout: float | None
    ) -> bool:
        """Wait until nothing of the run is queued or executing; ``False`` if that cannot be waited
        for: time runs out, or a worker waits for an import of this thread (R6).

        A worker that dies settles its tasks, except one that it was just taking or settling when
        something outside ended it. So every now and then the caller checks that all are alive. If
        one is not, and twice in a row nobody works on the run, the run is lost.
        """
        deadline = math.inf if timeout is None else monotonic() + timeout
        interval, lost = CHECK, 0
        while not run.outcome.wait(max(0.0, min(interval, deadline - monotonic()))):
            if monotonic() >= deadline or _deadlock(threads):
                return False
            needed = threads[: self._clock] if posting.is_done else threads
            dead = [thread.name for thread in needed if not thread.is_alive()]
            is_served = not dead or any(task.phase != WAITING for task in self._tasks_of(run))
            if lost < 2 and is_served:
                interval, lost = CHECK, 0
                continue
            interval, lost = _RECHECK, lost + 1
            if lost == 2:
                run.outcome.fail(0, self._error_of(dead))
                for stage in posting.stages:
                    stage.give_up()  # so that nobody waits for what will never come
            elif lost > 2 and not self._tasks_of(run):
                return True
        return True

    def _tasks_of(self, run: Run) -> list[TaskInfo]:
        """Return the tasks of ``run`` that workers, and the clock, execute or wait for."""
        tasks = [worker.doing for worker in self._pool.statistics()]
        return [task for task in tasks if task is not None and task.run == run.number]

    def _error_of(self, dead: list[str]) -> PipertError:
        if self._pool.closed:
            return PipeClosedError("the pipe was closed during the call")
        return WorkerDiedError(f"{' and '.join(dead)} ended from outside during the call")

    def _call_off(
        self, run: Run, posting: Posting, threads: list[WorkerThread], timeout: float | None
    ) -> None:
        """Cancel the run of an interrupted caller (R2).

        Waits for executing layers, which cannot be interrupted, until the time limit or the next
        interrupt.
        """
        run.outcome.cancel()
        self.post(posting)  # again, since it is unknown how far the interrupted call came
        if not self._wait(run, posting, threads, timeout):
            self._give_up(run, posting)
            what = "layers of an interrupted call had not returned"
            _log.warning("%s", self.timed_out(what, timeout))

    def _give_up(self, run: Run, posting: Posting) -> None:
        """Give up a run whose layer does not return: R2 as far as possible. Idempotent."""
        run.outcome.cancel()
        self._given_up[run.outcome] = os.getpid(), run.number
        for stage in posting.stages:
            stage.give_up()

    def timed_out(self, what: str, timeout: float | None) -> PipelineTimeout:
        """Build the error that ``what`` took too long, with the stack of each executing worker."""
        workers = self.workers()
        lines = [f"{what} after {timeout or 0.0:g} s. What the workers were doing:", ""]
        lines += table(workers)
        for k, worker in enumerate(workers):
            if worker.doing is not None and worker.doing.phase != WAITING:
                stack = self._pool.stack(k).rstrip()
                lines += ["", f"{worker.name} was at (most recent call last):", stack]
        error = PipelineTimeout("\n".join(lines))
        error.workers = workers
        return error


def _deadlock(threads: list[WorkerThread]) -> ReentrantCallError | None:
    """Return the error of a call whose layer waits for an import of this thread, if one does."""
    for thread in threads:
        if name := thread.import_awaited():
            return ReentrantCallError(
                f"a layer on {thread.name} imports {name!r}, which the thread that calls the pipe "
                "is importing: each would wait for the other. Call the pipe after that import, or "
                "import what the layer needs before the call"
            )
    return None


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
