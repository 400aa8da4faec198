"""Assembles the stages of a model that keeps its own ``forward``, and carries out its actions.

``F[i,j]`` hands off its partition to a micro-batch thread. The other actions are as for layers that
are called one by one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pipert._typing import Value
from pipert.any_model.current_partition import ModelRun
from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.any_model.microbatch_thread import MicroBatchThreads
from pipert.any_model.model_layers import ModelLayers
from pipert.any_model.shared_state import Inspection, SharedState
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.intercepted import calls_of, forget_devices, intercept, is_unseen, release
from pipert.model.cuts import lookup
from pipert.schedules.action import FORWARD
from pipert.stage.actions import ACTIONS, Actions
from pipert.stage.assembly import Layered, assemble
from pipert.stage.loss import StepFunction
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.stage.step import Step


class AnyModel:
    """A model whose own ``forward`` a pipe runs: its layers, their homes, and its threads.

    Args:
        module: the model.
        partitions: the layers of each partition, by name.
        cuts: the names of the layers that partitions begin with.
        devices: the device of each partition.
    """

    def __init__(
        self, module: nn.Module, partitions: Sequence[nn.Sequential], cuts: Sequence[str],
        devices: Sequence[torch.device],
    ) -> None:  # fmt: skip
        self.module = module
        self.partitions = tuple(partitions)
        self.threads = MicroBatchThreads()
        self.layers = ModelLayers(module, partitions, cuts)
        self._begun = {name: p._modules[name] for name, p in zip(cuts, partitions[1:], strict=True)}
        self._model = Layered(self.partitions, ((),) * len(partitions), keeps_forward=True)
        self._shared = SharedState([module])
        self._intercepted = [*self.layers.encoders, *self.layers]
        intercept(self._intercepted)
        forget_devices(module.modules())
        if len(set(devices)) > 1:  # also when the pipe is closed: they stay on their devices
            for layer in self.layers.values():
                calls_of(layer.module).bring = partial(self.layers.call_by_itself, layer, devices)

    @property
    def entry(self) -> nn.Module:
        return self.module

    @property
    def norm_parts(self) -> Sequence[nn.Module]:
        return [self.module]  # a layer may be called in any partition

    def function_of(self, step: StepFunction | None) -> StepFunction | None:
        return step

    def assemble(
        self, run: Run, inputs: list[Value], step: Step | None, stats: DeferredStats | None
    ) -> list[Stage]:
        self._refuse_changes()
        self.layers.refuse_moved(run.devices)
        whole = None if stats is None else stats.partitions[0]
        model_run = ModelRun(run, self.module, self.layers, step, whole)
        actions = ModelActions(model_run, self.threads)
        stages = assemble(run, self._model, inputs, step, None, actions.table())
        for stage in stages:
            stage.layers.copies = model_run.parameters
        model_run.draws = any(stage.layers.draws for stage in stages)
        run.seed.draw()  # the model's own code may draw
        if run.plan.m > 1 and run.plan.n > 1 and self._shared.is_due():
            inspection = Inspection(self._shared, self.layers.homes, model_run.called_in)
            model_run.inspection = inspection
        run.at_end = actions.finish
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


class ModelActions:
    """Carries out the actions of one run."""

    def __init__(self, model_run: ModelRun, threads: MicroBatchThreads) -> None:
        self._model_run = model_run
        self._threads = threads
        self._microbatches: dict[int, MicroBatchForward] = {}

    def table(self) -> Actions:
        """Return the function that carries out each kind of action."""
        return {**ACTIONS, FORWARD: self.forward}

    def forward(self, stage: Stage, i: int, x: Value) -> Value:
        """Carry out ``F[i,j]``: hand off to micro-batch ``i``, which partition 0 starts."""
        if stage.place.j == 0:
            microbatch = MicroBatchForward(self._model_run, i, x, self._threads.release)
            self._microbatches[i] = microbatch
            self._threads.start(microbatch)
        microbatch = self._microbatches[i]
        worker: Any = threading.current_thread()
        worker.executed_by = microbatch.thread
        try:
            return microbatch.hand_off(stage)
        finally:
            worker.executed_by = None

    def finish(self) -> None:
        """End each ``forward`` and wait for them, however the run ended (H3). In the caller."""
        microbatches = list(self._microbatches.values())
        for microbatch in microbatches:
            microbatch.unwind()
        if not self._model_run.run.dropped:
            for microbatch in microbatches:
                microbatch.wait()
        self._microbatches.clear()
        if not self._model_run.run.outcome.has_failed():
            self._model_run.layers.warn_of_cuts()
        self._model_run.clear()
