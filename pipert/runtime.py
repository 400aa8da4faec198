"""The engine of a pipe: its threads, and one mini-batch's way through them.

Guarantees:

* **R1** a result belongs to one run: each has queues and outputs of its own, and nothing survives
  it.
* **R2** when :meth:`Runtime.forward` returns, raises or is interrupted, no task of its run is
  queued or executing.
* **R3**, **R4** see ``progress``.
* **R5** after any failure the runtime is usable at once and holds no tensor of the failed run: it
  holds no run at all. Lanes reference the run's progress, not the other way round, so no cycle
  delays that.
* **R6** every wait notices a dead worker: its tasks are abandoned, and an abandoned task sends what
  its successor waits for. A layer that never returns is noticed by those who set a time limit; what
  R2 means then is in ``overdue``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextvars import ContextVar
from time import monotonic

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batchnorm import DeferredStats
from pipert.clock import Posting
from pipert.components import ALL, Components
from pipert.device import assign_workers
from pipert.errors import (
    PipeClosedError,
    PipelineTimeout,
    PipertError,
    ReentrantCallError,
    WorkerDiedError,
)
from pipert.lane import Lane
from pipert.ledger import Account, Ledger
from pipert.overdue import Overdue, still_busy, timed_out
from pipert.queues.closable import ClosableQueue
from pipert.recorded_lane import RecordedLane
from pipert.run import Run
from pipert.schedule import Schedule
from pipert.skip import store
from pipert.skip.routes import routes
from pipert.status import FORWARD, Statistics, TaskStatus, WorkerStatistics
from pipert.stream import ComputeStreams, CopyStreams
from pipert.tied import borrowed
from pipert.value import select
from pipert.workers.activity import State
from pipert.workers.context import CallerContext
from pipert.workers.pool import Pool, WorkerView
from pipert.workers.worker import WorkerThread

__all__: list[str] = []

_log = logging.getLogger("pipert")

_LOOK = 0.5  # s; how often a caller looks whether all workers are alive
_LOOK_AGAIN = 0.02  # s; and, when one is not, whether the others are done with the run

# The runtimes whose tasks the current code runs inside of, carried into workers like all variables.
# Each by an object that stands for it: a graph keeps its context, and would keep the runtime.
_inside: ContextVar[tuple[object, ...]] = ContextVar("pipert_inside", default=())


class Runtime:
    """Runs mini-batches through partitions.

    Args:
        partitions: each on its device already.
        devices: one for each partition.
    """

    def __init__(
        self, partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]
    ) -> None:
        self._partitions = tuple(partitions)
        self.devices = tuple(devices)
        self.workers = assign_workers(list(devices))
        self.components = ALL
        self._identity = object()
        self._overdue = Overdue()
        self.ledger = Ledger()
        served = [devices[self.workers.index(w)] for w in range(len(set(self.workers)))]
        names = [f"pipert-{device}-{w}" for w, device in enumerate(served)]
        self._cpu_workers = sum(device.type == "cpu" for device in served)
        self._clock = len(names)
        self.pool = Pool([*names, "pipert-clock"], [*served, torch.device("cpu")])

    @property
    def components(self) -> Components:
        """The parts that it has. Changed before the first call, if ever."""
        return self._components

    @components.setter
    def components(self, components: Components) -> None:
        self._components = components
        self._streams = CopyStreams() if components.copy_streams else ComputeStreams()
        self.route_skips()

    def route_skips(self) -> None:
        """Find out where skips go: again when a layer was replaced."""
        self._skips = routes(self._partitions, self._components.direct_skips)

    def forward(
        self,
        inputs: list[Value],
        checkpointed: int,
        stats: DeferredStats | None = None,
        timeout: float | None = None,
    ) -> list[Value]:
        """Compute all micro-batches; the first ``checkpointed`` of them with checkpointing.

        Args:
            inputs: what ``microbatch.scatter`` returns. Emptied as the run goes on.
            checkpointed: from 0 to ``len(inputs)``.
            stats: where running statistics are noted, if they are deferred.
            timeout: seconds after which the call gives up.

        Returns:
            The last partition's output for each micro-batch.
        """
        if self._identity in _inside.get():
            raise ReentrantCallError(
                "a layer called the pipe that is running it, whose worker would wait for itself; "
                "call the layers it needs directly"
            )
        crew = self.pool.start()
        busy = self.stuck()
        if busy:
            raise still_busy(busy)
        with self.ledger.open(len(inputs), len(self._partitions)) as account:
            run = self._run(inputs, checkpointed, account)
            posting = Posting(self._lanes(run, inputs, stats), self.workers, self.pool.put)
            self._execute(run, posting, crew, timeout)
            error = run.progress.take_error()
            if error is None:
                account.outcome = "succeeded"
                return run.outputs
            if not (isinstance(error, PipeClosedError) and self.pool.closed):
                account.outcome = "failed"
                i, j = run.schedule.task_at(run.progress.failed_at)
                account.failed(i, j, self.devices[j], error)
            try:
                raise error
            finally:
                del error  # it references this frame

    def stuck(self) -> list[WorkerStatistics]:
        """The workers that are busy with a call that was given up."""
        return [] if self._overdue.is_empty() else self._overdue.busy(self.statistics().workers)

    def _execute(
        self, run: Run, posting: Posting, crew: list[WorkerThread], timeout: float | None
    ) -> None:
        """Post the run and wait for it."""
        try:
            self.pool.put(self._clock, posting)
            if self._wait(run, posting, crew, timeout):
                return
            error = self._timed_out("a call of the pipe was not over", timeout)
            self._give_up(run, posting)
        except BaseException:
            try:
                self._call_off(run, posting, crew, timeout)
            except BaseException:  # noqa: B036  at its very beginning, or between two of its rounds
                self._call_off(run, posting, crew, timeout)
            raise
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait(
        self, run: Run, posting: Posting, crew: list[WorkerThread], timeout: float | None
    ) -> bool:
        """Wait until nothing of the run is queued or executing, or the time is over (R6).

        A worker that dies settles its tasks, but for those that something outside ended it right in
        the middle of taking or settling. So every now and then it is looked whether all are alive.
        If one is not, and twice in a row nobody works on the run, it is lost.
        """
        deadline = math.inf if timeout is None else monotonic() + timeout
        look, lost = _LOOK, 0
        while not run.progress.wait(max(0.0, min(look, deadline - monotonic()))):
            if monotonic() >= deadline:
                return False
            needed = crew[: self._clock] if posting.is_done else crew
            dead = [thread.name for thread in needed if not thread.is_alive()]
            if lost < 2 and (not dead or any(state.works for state in self._at(run))):
                look, lost = _LOOK, 0
                continue
            look, lost = _LOOK_AGAIN, lost + 1
            if lost == 2:
                run.progress.fail(0, self._died(dead))
                for lane in posting.lanes:
                    lane.give_up()  # so that nobody waits for what does not come
            elif lost > 2 and not self._at(run):
                return True
        return True

    def _at(self, run: Run) -> list[State]:
        """The workers that work on a task of the run, or wait for its input."""
        number = run.account.run.number
        states = [view.state for view in self.pool.look()]
        return [state for state in states if state.what is not None and state.what.run == number]

    def _died(self, dead: list[str]) -> PipertError:
        if self.pool.closed:
            return PipeClosedError("the pipe was closed during the call")
        return WorkerDiedError(f"{' and '.join(dead)} ended from outside during the call")

    def _call_off(
        self, run: Run, posting: Posting, crew: list[WorkerThread], timeout: float | None
    ) -> None:
        """R2 for an interrupted caller: the layers that are executing cannot be interrupted."""
        interrupts = 0
        while True:
            try:
                run.progress.cancel()
                if interrupts == 1:  # once: it may be the log's own handler that raises
                    _log.warning("interrupted again; waiting for the layers that are executing")
                # Again, since nobody knows how far the interrupted call came. It posts once.
                self.pool.put(self._clock, posting)
                if not self._wait(run, posting, crew, timeout):
                    self._give_up(run, posting)
                    _log.warning("an interrupted call leaves a layer behind that does not return")
                return
            except BaseException:  # noqa: B036  the first interrupt is being raised
                interrupts += 1

    def _give_up(self, run: Run, posting: Posting) -> None:
        """R2 as far as it goes when a layer does not return; see ``overdue``. Again: no-op."""
        run.progress.cancel()
        self._overdue.add(run.progress, run.account.run.number)
        for lane in posting.lanes:
            lane.give_up()

    def _timed_out(self, what: str, timeout: float | None) -> PipelineTimeout:
        workers = self.statistics().workers
        stacks = {
            worker.name: self.pool.stack(k)
            for k, worker in enumerate(workers)
            if worker.doing is not None and worker.doing.phase == FORWARD
        }
        return timed_out(what, timeout or 0.0, workers, stacks)

    def statistics(self) -> Statistics:
        """What has happened so far, and what is happening. From any thread."""
        workers = tuple(_statistics(view) for view in self.pool.look()[: self._clock])
        return Statistics(**self.ledger.read(), workers=workers)

    def _run(self, inputs: list[Value], checkpointed: int, account: Account) -> Run:
        on_cuda = {device for device in self.devices if device.type == "cuda"}
        on_cuda.update(tensor.device for tensor in select(inputs[0], _is_cuda)[0])
        context = CallerContext(list(on_cuda), self._cpu_workers)
        context.set_variable(_inside, (*_inside.get(), self._identity))
        context.set_variable(store.of_task, store.NEW)
        schedule = Schedule(len(inputs), len(self._partitions))
        return Run(
            schedule, checkpointed, self.devices, context, self._streams, account,
            self._components,
        )  # fmt: skip

    def _lanes(
        self, run: Run, inputs: list[Value], stats: DeferredStats | None
    ) -> list[Lane]:
        n = len(self._partitions)
        queues: list[ClosableQueue[Value]] = [ClosableQueue() for _ in range(n - 1)]
        weights = borrowed(self._partitions, self.devices)
        kind = Lane if run.account.recorder is None else RecordedLane
        return [
            kind(
                run,
                j,
                self._partitions[j],
                self._skips[j],
                weights[j],
                stats.partitions[j] if stats else None,
                queues[j - 1] if j > 0 else inputs,
                queues[j].put if j < n - 1 else run.outputs.append,
            )
            for j in range(n)
        ]

    def close(self, timeout: float | None = None) -> None:
        """End the threads; join them, unless a task of this runtime is what calls.

        Raises:
            PipelineTimeout: they have been told to end, and did not within ``timeout`` seconds.
        """
        if self.pool.close(join=self._identity not in _inside.get(), timeout=timeout):
            raise self._timed_out("the threads of the pipe had not ended", timeout)

    def __repr__(self) -> str:
        return f"<Runtime of {len(self._partitions)} partitions, {self.pool!r}>"


def _statistics(view: WorkerView) -> WorkerStatistics:
    doing, what = None, view.state.what
    if what is not None:
        seconds = max(0.0, view.now - view.state.since)
        doing = TaskStatus(what.run, what.phase, what.partition, what.micro_batch, seconds)
    return WorkerStatistics(
        view.name, view.device, view.state.tasks, view.busy, view.depth, doing
    )


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda
