"""Waiting for a run: until nothing of it is queued or executing, whatever happens meanwhile.

Guarantees:

* **R2** when :meth:`Waiting.execute` returns, raises or is interrupted, no task of the run is
  queued or executing, but for what a run that was given up leaves behind.
* **R6** every wait notices a dead worker: its tasks are abandoned, and an abandoned task sends what
  its successor waits for. A worker killed half-way through that is detected by polling.

A layer that is executing cannot be interrupted, so a call whose time is over leaves tasks behind.
Those that have not begun do not begin any more; the one that is executing goes on, to the end of
its partition. Until then its worker serves nobody, and calls say so at once instead of waiting
behind it. What is remembered of the run is whether it is settled; it holds no tensors (**R5**) but
what the executing layer itself holds.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field
from time import monotonic

from pipert.engine.clock import Posting
from pipert.engine.timeout import still_busy, timed_out
from pipert.errors import PipeClosedError, PipelineTimeout, PipertError, WorkerDiedError
from pipert.stage.outcome import Outcome
from pipert.stage.run import Run
from pipert.status import WAITING, TaskStatus, WorkerStatistics
from pipert.workers.activity import State
from pipert.workers.pool import Pool, WorkerView
from pipert.workers.worker import WorkerThread

__all__: list[str] = []

_log = logging.getLogger("pipert")

_LOOK = 0.5  # s; how often a caller looks whether all workers are alive
_LOOK_AGAIN = 0.02  # s; and, when one is not, whether the others are done with the run


@dataclass(slots=True, eq=False)
class Waiting:
    """Waits for the runs of one pipe. Any thread."""

    _pool: Pool
    _clock: int
    """Which of the pool's threads is the clock: the last one, behind the workers."""
    _given_up: dict[Outcome, tuple[int, int]] = field(default_factory=dict)
    """The runs that were given up and are not settled: in which process, and which number."""

    def threads(self) -> list[WorkerThread]:
        """Return the threads, started if need be.

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
        """What each worker is doing."""
        return tuple(_statistics(view) for view in self._pool.look()[: self._clock])

    def stuck(self) -> list[WorkerStatistics]:
        """The workers that are executing a task of a call that was given up.

        A task that is queued, behind the healthy task of another call, is no reason to refuse any.
        """
        for outcome, (pid, _) in list(self._given_up.items()):
            if outcome.is_settled() or pid != os.getpid():
                self._given_up.pop(outcome, None)
        numbers = {number for _, number in list(self._given_up.values())}
        workers = self.workers() if numbers else ()
        return [w for w in workers if w.doing is not None and w.doing.run in numbers]

    def execute(
        self, run: Run, posting: Posting, threads: list[WorkerThread], timeout: float | None
    ) -> None:
        """Post the run and wait for it."""
        try:
            self._pool.put(self._clock, posting)
            if self._wait(run, posting, threads, timeout):
                return
            error = self.timed_out("a call of the pipe was not over", timeout)
            self._give_up(run, posting)
        except BaseException:
            try:
                self._call_off(run, posting, threads, timeout)
            except BaseException:  # noqa: B036  at its very beginning, or between two of its rounds
                self._call_off(run, posting, threads, timeout)
            raise
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait(
        self, run: Run, posting: Posting, threads: list[WorkerThread], timeout: float | None
    ) -> bool:
        """Wait until nothing of the run is queued or executing, or the time is over (R6).

        A worker that dies settles its tasks, but for those that something outside ended it right in
        the middle of taking or settling. So every now and then the caller looks whether all are
        alive. If one is not, and twice in a row nobody works on the run, the run is lost.
        """
        deadline = math.inf if timeout is None else monotonic() + timeout
        look, lost = _LOOK, 0
        while not run.outcome.wait(max(0.0, min(look, deadline - monotonic()))):
            if monotonic() >= deadline:
                return False
            needed = threads[: self._clock] if posting.is_done else threads
            dead = [thread.name for thread in needed if not thread.is_alive()]
            if lost < 2 and (not dead or any(state.works for state in self._at(run))):
                look, lost = _LOOK, 0
                continue
            look, lost = _LOOK_AGAIN, lost + 1
            if lost == 2:
                run.outcome.fail(0, self._died(dead))
                for stage in posting.stages:
                    stage.give_up()  # so that nobody waits for what does not come
            elif lost > 2 and not self._at(run):
                return True
        return True

    def _at(self, run: Run) -> list[State]:
        """The workers that work on a task of the run, or wait for its input."""
        states = [view.state for view in self._pool.look()]
        return [state for state in states if state.what and state.what[0] == run.number]

    def _died(self, dead: list[str]) -> PipertError:
        if self._pool.closed:
            return PipeClosedError("the pipe was closed during the call")
        return WorkerDiedError(f"{' and '.join(dead)} ended from outside during the call")

    def _call_off(
        self, run: Run, posting: Posting, threads: list[WorkerThread], timeout: float | None
    ) -> None:
        """R2 for an interrupted caller: the layers that are executing cannot be interrupted.

        They are waited for, until the time limit or the third interrupt.
        """
        interrupts, began = 0, monotonic()
        while True:
            try:
                run.outcome.cancel()
                if interrupts == 1:  # once: it may be the log's own handler that raises
                    _log.warning(
                        "interrupted again; waiting for the layers that are executing, until you "
                        "interrupt a third time"
                    )
                # Again, since nobody knows how far the interrupted call came. It posts once.
                self._pool.put(self._clock, posting)
                if not self._wait(run, posting, threads, 0.0 if interrupts > 1 else timeout):
                    is_known = run.outcome in self._given_up
                    self._give_up(run, posting)
                    if not is_known:  # once, as above
                        what = "layers of an interrupted call had not returned"
                        _log.warning("%s", self.timed_out(what, monotonic() - began))
                return
            except BaseException:  # noqa: B036  the first interrupt is being raised
                interrupts += 1

    def _give_up(self, run: Run, posting: Posting) -> None:
        """R2 as far as it goes when a layer does not return. Again: no-op."""
        run.outcome.cancel()
        self._given_up[run.outcome] = os.getpid(), run.number
        for stage in posting.stages:
            stage.give_up()

    def timed_out(self, what: str, timeout: float | None) -> PipelineTimeout:
        """The error for ``what`` took too long."""
        return timed_out(what, timeout or 0.0, self.workers(), self._pool.stack)

    def __repr__(self) -> str:
        return f"<Waiting for {self._pool!r}>"


def _statistics(view: WorkerView) -> WorkerStatistics:
    doing, what = None, view.state.what
    if what is not None:
        seconds = max(0.0, view.now - view.state.since)
        number, action = what
        phase = action.phase if view.state.works else WAITING
        doing = TaskStatus(number, phase, action.j, action.i, seconds)
    return WorkerStatistics(
        view.name, view.device, view.state.tasks, view.busy, view.depth, doing
    )
