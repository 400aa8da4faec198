"""Runs mini-batches on the threads of a pipe.

Guarantees:

* **R1** a result belongs to one run: each run has its own links and outputs, and leaves nothing for
  the next.
* **R2**, **R6** see ``waiting``.
* **R3**, **R4** see ``stage.run``.
* **R5** after any failure the runtime is usable at once and holds no tensor of the failed run: it
  holds no run at all. Stages reference the run's outcome, not the other way round, so no cycle
  keeps a run alive.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pipert._typing import Value
from pipert.autograd.order import begin_numbers
from pipert.autograd.streams import CopyStreams, devices_with_own_streams
from pipert.batch.tensors import differentiable
from pipert.engine.clock import Posting
from pipert.engine.waiting import Waiting
from pipert.errors import PipeClosedError, ReentrantCallError
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.modules import compute_cached
from pipert.layers.random_numbers import RunSeed, Turns, paused
from pipert.model.devices import refuse_data_parallel, refuse_gradients_of_rows
from pipert.observe.run_trace import RunTrace, Trace
from pipert.schedules.action import RECOMPUTE
from pipert.schedules.plan import Plan, plan_call
from pipert.skip.store import of_task
from pipert.stage.assembly import Layered
from pipert.stage.run import Run
from pipert.stage.step import Step
from pipert.status import Statistics
from pipert.workers.context import CallerContext
from pipert.workers.pool import Pool
from pipert.workers.worker import WorkerThread

# The runtimes inside whose tasks the current code runs. Tasks get it from the caller, as they get
# all context variables. An object represents each runtime: a graph keeps its context, and would
# keep the runtime.
_inside: ContextVar[tuple[object, ...]] = ContextVar("pipert_inside", default=())


Function = Callable[..., Value] | None

_MODULES, _MODE = attrgetter("_modules"), attrgetter("training")


class Runtime:
    """Runs mini-batches through partitions; ``devices`` and ``workers`` say where each one runs."""

    def __init__(
        self,
        model: Layered,
        devices: Sequence[torch.device],
        workers: Sequence[int],
    ) -> None:
        self.model = model
        self.devices = tuple(devices)
        self.workers = tuple(workers)
        self._streams = CopyStreams()
        self._kinds = set[type]()  # the classes of layers that are known not to be data-parallel
        self._identity = object()
        self._modes: list[bool] = []  # of the layers, in the last run
        self._turns = Turns()  # those of its tasks; shared by runs that overlap
        self.trace = Trace()
        served = [devices[self.workers.index(w)] for w in range(len(set(self.workers)))]
        names = [f"pipert-{device}-{w}" for w, device in enumerate(served)]
        self._cpu_workers = sum(device.type == "cpu" for device in served)
        self.pool = Pool([*names, "pipert-clock"], [*served, torch.device("cpu")])
        self.waiting = Waiting(self.pool, len(names))

    def call(
        self,
        inputs: list[Value],
        recomputed: Sequence[int],
        stats: DeferredStats | None = None,
        timeout: float | None = None,
        function: Function = None,
    ) -> list[Value]:
        """Compute all micro-batches forward; return the last partition's outputs.

        Args:
            inputs: one value per micro-batch. Emptied as the run proceeds.
            recomputed: for each partition, the number of micro-batches, from the first, that are
                checkpointed.
            stats: where running statistics are noted, if they are deferred.
            timeout: seconds after which the call gives up.
            function: runs for each micro-batch in place of the model, and calls it or parts of it.
        """
        begin_numbers(len(inputs))  # so what the caller does next goes backward before turns
        plan = plan_call(len(inputs), len(self.devices), self.workers, recomputed)
        threads = self._threads()
        with self.trace.open(plan) as trace:
            run = self._new_run(plan, trace, function)
            posting = Posting(self.model.assemble(run, inputs, None, stats), self.pool.put)
            self._execute(run, posting, threads, timeout)
            if len({device for device in self.devices if device.type == "cuda"}) > 1:
                nodes = {y.grad_fn for y in differentiable(run.outputs)[0] if y.grad_fn is not None}
                run.seed.guard_backward(nodes)
            trace.outcome = "succeeded"
            return run.outputs

    def map(
        self, values: Iterable[Value], recomputed: Sequence[int], timeout: float | None
    ) -> Iterator[Value]:
        """Compute micro-batches forward as they come; yield their outputs in order.

        Each is a run of its own. As many are in flight as keep all partitions busy; when the
        iterator is closed, or fails, the others are cancelled. Arguments are as in :meth:`call`.
        """
        in_flight = deque[tuple[Generator[Any, None, None], Callable[[], None]]]()
        seed = RunSeed()
        try:
            for x in values:
                begun = self._begun(x, recomputed, timeout, seed)
                in_flight.append((begun, next(begun)))
                del begun
                if len(in_flight) > 2 * len(self.devices):
                    yield next(in_flight.popleft()[0])
            while in_flight:
                yield next(in_flight.popleft()[0])
        finally:
            for _, cancel in in_flight:  # all, before any of them is waited for
                cancel()
            for begun, _ in in_flight:
                begun.close()
            seed.settle()

    def _begun(
        self, x: Value, recomputed: Sequence[int], timeout: float | None, seed: RunSeed
    ) -> Generator[Any, None, None]:
        """Begin the run of one micro-batch, yield what cancels it; wait, yield its output."""
        begin_numbers(1)
        plan = plan_call(1, len(self.devices), self.workers, recomputed)
        threads = self._threads()
        with self.trace.open(plan) as trace:
            run = self._new_run(plan, trace, seed=RunSeed(of_all=seed))
            run.seed.is_concurrent = True
            posting = Posting(self.model.assemble(run, [x], None, None), self.pool.put)
            del x
            try:
                self.waiting.post(posting)
                yield run.outcome.cancel
            except BaseException:
                run.outcome.cancel()
                if threading.current_thread() in threads:
                    # The iterator was collected in a layer, behind which the run's tasks wait.
                    for stage in posting.stages:
                        stage.give_up()
                    run.end()
                    raise
                limit = 0.0 if self.waiting.stuck() else timeout  # it waits behind one given up
                with contextlib.suppress(Exception):  # an earlier one is the first in order
                    self._execute(run, posting, threads, limit)
                raise
            self._execute(run, posting, threads, timeout)
            trace.outcome = "succeeded"
            yield run.outputs.pop()

    def step(
        self,
        inputs: list[Value],
        plan: Plan,
        step: Step,
        stats: DeferredStats | None = None,
        timeout: float | None = None,
        function: Function = None,
    ) -> Tensor:
        """Compute all micro-batches forward and backward, and add their gradients to ``.grad``.

        Returns the loss. Arguments are as in :meth:`call`.
        """
        threads = self._threads()
        with self.trace.open(plan) as trace:
            compute_cached(self.model.partitions)
            step.inputs = [differentiable(x)[0] for x in inputs]
            run = self._new_run(plan, trace, function)
            stages = self.model.assemble(run, inputs, step, stats)
            self._execute(run, Posting(stages, self.pool.put), threads, timeout)
            try:
                run.effects.check()
                step.check()
                if stats is not None:
                    stats.commit()  # before any gradient arrives, as in the plain module's forward
                cuts = [cut for stage in stages if (cut := stage.step_boundary) is not None]
                sums = [cut.gradients for cut in cuts]
                loss = step.commit(sums)
            except Exception:
                trace.outcome = "failed"  # but no task has, so none is reported to observers
                raise
            trace.outcome = "succeeded"
            return loss

    def _threads(self) -> list[WorkerThread]:
        """Return the started threads, or raise the reason why they cannot take a run."""
        if self.is_inside():
            raise ReentrantCallError(
                "a layer called the pipe that is running it, whose worker would wait for itself; "
                "call the layers it needs directly"
            )
        return self.waiting.threads()

    def _new_run(
        self, plan: Plan, trace: RunTrace, function: Function = None,
        seed: RunSeed | None = None,
    ) -> Run:  # fmt: skip
        for partition in self.model.partitions:  # fully_shard changes the classes of modules
            kinds = {*map(type, partition._modules.values())}
            if not kinds <= self._kinds:
                refuse_data_parallel(partition)
                self._kinds |= kinds
        on_cuda = {device for device in self.devices if device.type == "cuda"}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            on_cuda.update(devices_with_own_streams())  # arguments and targets may be anywhere
        context = CallerContext(list(on_cuda), self._cpu_workers)
        if plan.m > 1 and context.grad_enabled:
            refuse_gradients_of_rows(self.model.partitions)
        context.set_variable(_inside, (*_inside.get(), self._identity))
        context.set_variable(of_task, None)
        if on_cuda:
            self._streams.follow_the_caller(on_cuda)
        seed = RunSeed() if seed is None else seed
        run = Run(plan, self.devices, context, self._streams, trace, seed, function)
        layers = map(dict.values, map(_MODULES, self.model.partitions))
        modes, turns = [function, *map(_MODE, chain.from_iterable(layers))], self._turns
        if modes != self._modes or len(self.trace.live) < 2:  # this one is alone
            self._modes, self._turns = modes, turns = modes, run.seed.turns
        run.seed.turns = turns
        overlap = plan.m > 1 or RECOMPUTE in plan.occurring_kinds
        run.seed.is_concurrent |= overlap and len(set(self.workers)) > 1
        return run

    def _execute(
        self, run: Run, posting: Posting, threads: list[WorkerThread], timeout: float | None
    ) -> None:
        """Execute ``run``; raise its failure, if any."""
        try:
            with paused():
                try:
                    self.waiting.execute(run, posting, threads, timeout)
                finally:
                    run.seed.is_over = True  # or this thread waits for the generator of a stuck one
        finally:  # each, whatever interrupts another
            try:
                run.end()
            finally:
                try:
                    run.return_what_was_read()
                finally:
                    run.seed.settle()
        trace, error = run.trace, run.outcome.take_error()
        if error is None:
            return
        if not (isinstance(error, PipeClosedError) and self.pool.closed):
            trace.outcome = "failed"
            action = run.plan.order[run.outcome.failed_at]
            trace.failed(action, self.devices[action.j], error)
        try:
            raise error
        finally:
            del error  # it references this frame

    def is_inside(self) -> bool:
        """Return whether the caller runs inside a task of this runtime."""
        return self._identity in _inside.get()

    def statistics(self) -> Statistics:
        """Return what has happened so far, and what the workers are doing. Thread-safe."""
        return self.trace.statistics(self.waiting.workers())

    def close(self, timeout: float | None = None) -> None:
        """End the threads; join them unless called inside a task of this runtime.

        Raises:
            PipelineTimeout: they were told to end, but did not within ``timeout`` seconds.
        """
        if self.pool.close(join=not self.is_inside(), timeout=timeout):
            raise self.waiting.timed_out("the threads of the pipe had not ended", timeout)
