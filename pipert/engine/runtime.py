"""The engine of a pipe: its threads, and one mini-batch's way through them.

Guarantees:

* **R1** a result belongs to one run: each has queues and outputs of its own, and nothing survives
  it.
* **R2**, **R6** see ``watch``.
* **R3**, **R4** see ``progress``.
* **R5** after any failure the runtime is usable at once and holds no tensor of the failed run: it
  holds no run at all. Lanes reference the run's progress, not the other way round, so no cycle
  delays that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.autograd.streams import ComputeStreams, CopyStreams, devices_with_own_streams
from pipert.batch.tensors import differentiable
from pipert.engine.clock import Posting
from pipert.engine.waiting import Watch
from pipert.errors import PipeClosedError, ReentrantCallError
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.tied import borrowed, hooked
from pipert.model.devices import assign_workers
from pipert.queues.closable import ClosableQueue
from pipert.schedules.clock_cycle import Schedule
from pipert.schedules.plan import StepSchedule
from pipert.seeing.ledger import Account, Ledger
from pipert.skip import store
from pipert.skip.routes import routes
from pipert.stage.components import ALL, Components
from pipert.stage.lane import Lane
from pipert.stage.recorded_lane import RecordedLane, RecordedStepLane
from pipert.stage.run import Run
from pipert.stage.step import Step
from pipert.stage.step_lane import StepLane, leaf_inputs
from pipert.status import PHASES, Statistics
from pipert.workers.context import CallerContext
from pipert.workers.pool import Pool
from pipert.workers.worker import WorkerThread

__all__: list[str] = []

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
        self.ledger = Ledger()
        served = [devices[self.workers.index(w)] for w in range(len(set(self.workers)))]
        names = [f"pipert-{device}-{w}" for w, device in enumerate(served)]
        self._cpu_workers = sum(device.type == "cpu" for device in served)
        self.pool = Pool([*names, "pipert-clock"], [*served, torch.device("cpu")])
        self.watch = Watch(self.pool, len(names))

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
        crew = self._crew()
        with self.ledger.open(len(inputs), len(self._partitions)) as account:
            run = self._run(inputs, checkpointed, account)
            self._go(run, self._lanes(run, inputs, stats), crew, timeout)
            return run.outputs

    def step(
        self,
        inputs: list[Value],
        checkpointed: int,
        step: Step,
        stats: DeferredStats | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Compute all micro-batches, forward and backward, and add their gradients to ``.grad``.

        Args:
            inputs: what ``microbatch.scatter`` returns.
            checkpointed: from 0 to ``len(inputs)``.
            step: its schedule and its loss.
            stats: where running statistics are noted, if they are deferred.
            timeout: seconds after which the call gives up.

        Returns:
            The loss.
        """
        crew = self._crew()
        with self.ledger.open(len(inputs), len(self._partitions)) as account:
            account.is_step = True
            if account.recorder is not None:
                account.recorder.is_step()
            step.inputs = [differentiable(x)[0] for x in inputs]
            leaves = [leaf_inputs(x) for x in inputs]
            run = self._run(inputs, checkpointed, account, step.schedule)
            lanes = self._step_lanes(run, leaves, step, stats)
            self._go(run, lanes, crew, timeout)
        step.check()
        return step.commit([lane.gradients for lane in lanes])

    def _crew(self) -> list[WorkerThread]:
        """The workers, started; or the reason why they cannot take a run."""
        if self._identity in _inside.get():
            raise ReentrantCallError(
                "a layer called the pipe that is running it, whose worker would wait for itself; "
                "call the layers it needs directly"
            )
        return self.watch.crew()

    def _go(
        self, run: Run, lanes: Sequence[Lane], crew: list[WorkerThread], timeout: float | None
    ) -> None:
        """Run it; raise what failed."""
        posting = Posting(lanes, self.workers, self.pool.put)
        try:
            self.watch.execute(run, posting, crew, timeout)
        finally:
            run.return_what_was_read()
        account, error = run.account, run.progress.take_error()
        if error is None:
            account.outcome = "succeeded"
            return
        if not (isinstance(error, PipeClosedError) and self.pool.closed):
            account.outcome = "failed"
            task = run.progress.schedule.task_at(run.progress.failed_at)
            phase = PHASES[task.kind]
            account.failed(task.i, task.j, self.devices[task.j], error, phase)
        try:
            raise error
        finally:
            del error  # it references this frame

    def statistics(self) -> Statistics:
        """What has happened so far, and what is happening. From any thread."""
        return Statistics(**self.ledger.read(), workers=self.watch.workers())

    def _run(
        self,
        inputs: list[Value],
        checkpointed: int,
        account: Account,
        posted: StepSchedule | None = None,
    ) -> Run:
        on_cuda = {device for device in self.devices if device.type == "cuda"}
        on_cuda.update(devices_with_own_streams())  # arguments and targets may be anywhere
        context = CallerContext(list(on_cuda), self._cpu_workers)
        context.set_variable(_inside, (*_inside.get(), self._identity))
        context.set_variable(store.of_task, store.NEW)
        schedule = Schedule(len(inputs), len(self._partitions))
        self._streams.follow_the_caller(on_cuda)
        return Run(
            schedule, checkpointed, self.devices, context, self._streams, account,
            self._components, posted,
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

    def _step_lanes(
        self, run: Run, inputs: list[Value], step: Step, stats: DeferredStats | None
    ) -> list[StepLane]:
        n = len(self._partitions)
        there: list[ClosableQueue[Value]] = [ClosableQueue() for _ in range(n - 1)]
        back: list[ClosableQueue[Value]] = [ClosableQueue() for _ in range(n - 1)]
        weights = [
            (*others, *hooked(partition, others))
            for partition, others in zip(
                self._partitions, borrowed(self._partitions, self.devices), strict=True
            )
        ]
        kind = StepLane if run.account.recorder is None else RecordedStepLane
        return [
            kind(
                step,
                back[j] if j < n - 1 else None,
                back[j - 1].put if j > 0 else _nobody,
                run,
                j,
                self._partitions[j],
                self._skips[j],
                weights[j],
                stats.partitions[j] if stats else None,
                there[j - 1] if j > 0 else inputs,
                there[j].put if j < n - 1 else _nobody,
            )
            for j in range(n)
        ]

    def close(self, timeout: float | None = None) -> None:
        """End the threads; join them, unless a task of this runtime is what calls.

        Raises:
            PipelineTimeout: they have been told to end, and did not within ``timeout`` seconds.
        """
        if self.pool.close(join=self._identity not in _inside.get(), timeout=timeout):
            raise self.watch.timed_out("the threads of the pipe had not ended", timeout)

    def __repr__(self) -> str:
        return f"<Runtime of {len(self._partitions)} partitions, {self.pool!r}>"


def _nobody(_: Value) -> None:
    """Who gets what the last partition sends, and the first one sends back."""
