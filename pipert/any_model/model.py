"""Assembles the stages of a model that keeps its own ``forward``, and carries out its actions.

``F[i,j]`` hands off its partition to a micro-batch thread. The other actions are as for layers that
are called one by one.

A thread holds the stack of one micro-batch whose ``forward`` is under way. It computes only while a
worker hands off a partition to it, and waits otherwise, so no more threads compute than there are
workers. They are started on demand, one for each micro-batch in flight, and reused.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from pipert._typing import Value
from pipert.any_model.current_partition import ModelRun
from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.any_model.model_layers import ModelLayers
from pipert.any_model.shared_state import Inspection, SharedState
from pipert.errors import PipeClosedError
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.intercepted import calls_of, forget_devices, intercept, is_unseen, release
from pipert.model.cuts import lookup
from pipert.stage.assembly import Layered, assemble
from pipert.stage.loss import StepFunction
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.stage.step import Step
from pipert.workers.pool import Pool
from pipert.workers.worker import Activity, WorkerThread


class MicroBatchThread(WorkerThread):
    """A thread that executes the ``forward`` of one micro-batch after another."""

    def __init__(self, number: int) -> None:
        name = f"pipert-microbatch-{number}"
        super().__init__(name, torch.device("cpu"), Activity())
        self.microbatch: MicroBatchForward | None = None

    def stop(self) -> None:
        """Stop the thread. Inside a ``forward``, it stops at its next wait. Thread-safe."""
        super().stop()
        microbatch = self.microbatch
        if microbatch is not None:
            microbatch.unwind()


class MicroBatchThreads(Pool):
    """The micro-batch threads of one pipe, which stops them when it is closed or collected.

    One that is inside of a ``forward`` stops at its next wait.
    """

    _threads: list[Any]

    def __init__(self) -> None:
        super().__init__((), ())

    def _reset(self) -> None:
        super()._reset()
        self._idle: list[MicroBatchThread] = []
        self._numbers = itertools.count()

    def serve(self, microbatch: MicroBatchForward) -> None:
        """Hand ``microbatch`` to an idle thread, or to a new one. Thread-safe."""
        self._reset_in_child()
        try:
            while microbatch.thread is None:
                self._give(microbatch, self._take_idle() or self._start_new())
        except BaseException as error:
            microbatch.abandon(error)
            raise

    def _give(self, microbatch: MicroBatchForward, thread: MicroBatchThread) -> None:
        microbatch.thread, thread.microbatch = thread, microbatch
        if thread.in_queue.put(microbatch):
            microbatch.thread = thread.microbatch = None
            if self.closed:
                raise PipeClosedError("the pipe was closed during the call")

    def _take_idle(self) -> MicroBatchThread | None:
        with suppress(IndexError):
            while True:
                thread = self._idle.pop()  # atomic: no other caller gets it
                if thread.serves():
                    return thread
        return None

    def _start_new(self) -> MicroBatchThread:
        for old in list(self._threads):
            if old.in_queue.closed and not old.is_alive() and old in self._threads:
                self._threads.remove(old)
        thread = MicroBatchThread(next(self._numbers))
        self._threads.append(thread)  # before it starts, so that it is always stopped
        thread.start()
        if self.closed:
            thread.stop()
        return thread

    def release(self, microbatch: MicroBatchForward) -> None:
        """Take back the thread of a micro-batch that has ended."""
        thread = microbatch.thread
        if not isinstance(thread, MicroBatchThread):
            return
        thread.microbatch = None
        if microbatch.was_broken_off:
            thread.stop()
        else:
            self._idle.append(thread)


class AnyModel(Layered):
    """A model whose own ``forward`` a pipe runs: its layers, their homes, and its threads.

    Args:
        module: the model.
        partitions: the layers of each partition, by name.
        cuts: the names of the layers that partitions begin with.
        devices: the device of each partition.
    """

    keeps_forward = True

    def __init__(
        self, module: nn.Module, partitions: Sequence[nn.Sequential], cuts: Sequence[str],
        devices: Sequence[torch.device],
    ) -> None:  # fmt: skip
        super().__init__(partitions, ((),) * len(partitions))
        self.module = self.entry = module
        self.norm_parts = [module]  # a layer may be called in any partition
        self.threads = MicroBatchThreads()
        self.layers = ModelLayers(module, partitions, cuts)
        self._begun = {name: p._modules[name] for name, p in zip(cuts, partitions[1:], strict=True)}
        self._shared = SharedState([module])
        self._intercepted = [*self.layers.encoders, *self.layers]
        intercept(self._intercepted)
        forget_devices(module.modules())
        if len(set(devices)) > 1:  # also when the pipe is closed: they stay on their devices
            for layer in self.layers.values():
                calls_of(layer.module).bring = partial(self.layers.call_by_itself, layer, devices)

    def function_of(self, step: StepFunction | None) -> StepFunction | None:
        return step

    def assemble(
        self, run: Run, inputs: list[Value], step: Step | None, stats: DeferredStats | None
    ) -> list[Stage]:
        self._refuse_changes()
        self.layers.refuse_moved(run.devices)
        whole = None if stats is None else stats.partitions[0]
        model_run = ModelRun(run, self.module, self.layers, step, whole)
        forward = partial(_forward, model_run, self.threads)
        stages = assemble(run, self, inputs, step, None, forward)
        for stage in stages:
            stage.layers.copies = model_run.parameters
        model_run.draws = run.seed.number is not None  # drawn for layers that might
        run.seed.draw()  # the model's own code may draw
        if run.plan.m > 1 and run.plan.n > 1 and self._shared.is_due():
            called = model_run.called_in
            model_run.inspection = Inspection(self._shared, self.layers.homes, called)
        run.at_end = partial(_finish, model_run)
        return stages

    def _refuse_changes(self) -> None:
        """Refuse a model of which cuts, or modules around them, were replaced or compiled.

        Other layers that are put into the model later run like its own code.

        Raises:
            RuntimeError: they were.
        """
        found = [
            name
            for name, cut in self._begun.items()
            if lookup(self.module, name) is not cut or cut is None or is_unseen(cut)
        ]
        around = self.layers.around - {self.module}
        found += [type(module).__name__ for module in around if is_unseen(module)]
        if found:
            raise RuntimeError(
                f"the modules {found} were replaced or compiled after the pipe was made, so no "
                "partition would begin there; put adapters into the model and compile layers "
                "first, and make the pipe again: pipert.pipeline(pipe.module, cuts, ...)"
            )

    def to_end(self) -> Callable[[], None]:
        """Return a function that stops the threads and the interception. Keeps no module alive."""
        return partial(_end, self.threads, weakref.WeakSet(self._intercepted))


def _end(threads: MicroBatchThreads, layers: Iterable[nn.Module]) -> None:
    threads.stop()
    release(layers)


def _forward(
    model_run: ModelRun, threads: MicroBatchThreads, stage: Stage, i: int, x: Value
) -> Value:
    """Carry out ``F[i,j]``: hand off to micro-batch ``i``, which partition 0 starts."""
    if stage.place.j == 0:
        model_run.microbatches[i] = MicroBatchForward(model_run, i, x, threads.release)
        threads.serve(model_run.microbatches[i])
    microbatch: MicroBatchForward = model_run.microbatches[i]
    worker: Any = threading.current_thread()
    worker.executed_by = microbatch.thread
    try:
        return microbatch.hand_off(stage)
    finally:
        worker.executed_by = None


def _finish(model_run: ModelRun) -> None:
    """End each ``forward`` and wait for them, however the run ended (H3). In the caller."""
    microbatches: list[MicroBatchForward] = list(model_run.microbatches.values())
    for microbatch in microbatches:
        microbatch.unwind()
    outcome = model_run.run.outcome
    if outcome.is_settled():  # else it was given up, or never posted
        for microbatch in microbatches:
            microbatch.wait()
    model_run.microbatches.clear()
    model_run.inspection = None
    if model_run.step is not None:
        model_run.step.ledger.clear()
    if outcome.is_settled() and not outcome.has_failed():
        model_run.layers.warn_of_cuts()
