"""What the micro-batches of one run share, and what happens around the parts of each ``forward``.

A :class:`MicroBatchForward` decides when a partition begins and ends, and which calls are calls of
layers; here is what is done then: devices, random numbers, checkpointing, boundary tensors,
recordings.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import node_count
from pipert._typing import Value
from pipert.any_model.checkpointed_calls import CheckpointedCalls
from pipert.any_model.forward_recording import ForwardRecording
from pipert.any_model.function_mode import Paused
from pipert.any_model.intercept import Intercept
from pipert.any_model.map_tensors import map_tensors
from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.any_model.microbatch_thread import MicroBatchThreads
from pipert.any_model.model_layers import ModelLayer, ModelLayers
from pipert.any_model.parameter_copies import ParameterCopies
from pipert.any_model.shared_state import Inspection, SharedState
from pipert.any_model.tensor_copies import TensorCopies
from pipert.autograd.order import begin_numbers
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.buffers import KEEPING, kept_counters
from pipert.layers.dispatch_keys import stash
from pipert.layers.generators import DRAWING
from pipert.layers.nested_checkpoint import is_in_checkpoint
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed, Stream
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.stage.step import Step
from pipert.workers.context import NOTHING, is_transformed

__all__: list[str] = []


_CALLS = 1 << 32  # more than tasks of a run, so each call of a layer has its own number


class ModelRun:
    """The state that the micro-batches of one run share. Made by the caller."""

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        layers: ModelLayers,
        threads: MicroBatchThreads,
        step: Step | None,
        shared: SharedState,
    ) -> None:
        self.run = run
        self.module = module
        self.layers = layers
        self.n = run.plan.n
        self.step = step
        # Numbers of nodes below this are the caller's, or turns of micro-batches (autograd.order).
        self._first_node = max(node_count(), run.plan.m)
        self.draws = False
        """Whether any layer might draw random numbers; in which partition it will is unknown."""
        self.stats: PartitionStats | None = None
        """The deferred statistics of the whole model, if any. One worker notes each layer's."""
        self._moves = {device.type for device in run.devices} != {"cpu"}  # at least the arguments
        self._parameter_copies = ParameterCopies(module, step is not None, self._moves)
        self._threads = threads
        several = run.plan.m > 1 and self.n > 1
        self._inspection: Inspection | None = shared.begin_run() if several else None
        self.intercepts: dict[int, Intercept] = {}
        self.checkpointed: dict[tuple[int, int], CheckpointedCalls] = {}
        """Those of a step, until they are recomputed."""
        self._microbatches: dict[int, MicroBatchForward] = {}

    # On workers.

    def hand_off(self, stage: Stage, i: int, x: Value) -> Value:
        """Hand off the partition of ``stage`` to micro-batch ``i``, which partition 0 starts."""
        if stage.place.j == 0:
            microbatch = MicroBatchForward(self, i, x, self._threads.release)
            self._microbatches[i] = microbatch
            self._threads.start(microbatch)
        microbatch = self._microbatches[i]
        worker: Any = threading.current_thread()
        worker.executed_by = microbatch.thread
        try:
            return microbatch.hand_off(stage)
        finally:
            worker.executed_by = None

    # On micro-batch threads.

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Put a ``forward`` into its context, from its beginning to its end."""
        notes = NOTHING if self.stats is None else self.stats.collecting()
        try:
            # The model's own code may draw random numbers. Inside a layer that another pipe
            # recomputes, buffers stay as they are.
            keeping = NOTHING if kept_counters.get() is None else KEEPING.included()
            # Gradients that it asks for make nodes on this thread, with its numbers, on GPUs too.
            cuts = self.step is not None and self._moves
            numbers = torch.autograd.set_multithreading_enabled(False) if cuts else NOTHING
            with DRAWING.included(), keeping, notes, numbers:
                yield
        finally:
            stash(None)  # else torch drops it when the thread ends, maybe after the interpreter

    def pass_through(self, microbatch: MicroBatchForward, x: Value) -> Value:
        """Run the model on micro-batch ``i``; return what the last stage sends."""
        with self.around():
            return self._pass_through(microbatch, x)

    def _pass_through(self, microbatch: MicroBatchForward, x: Value) -> Value:
        begin_numbers(self._first_node)
        if self.run.notifier.recorder is not None:
            microbatch.recording = ForwardRecording(microbatch.i, self.run.notifier, self.layers)
        if self.step is not None or self._moves:
            parameters, moves = self._parameter_copies, None
            if self._moves:
                moves = TensorCopies(microbatch.i, self.run, parameters)
            copy_of = partial(self._copy_of, microbatch) if parameters.is_needed else None
            microbatch.intercept = Intercept(self.step is not None, moves, copy_of)
            if self.step is not None:
                self.intercepts[microbatch.i] = microbatch.intercept
        self.begin(microbatch)
        intercept = microbatch.intercept
        if intercept is None:
            y = microbatch.forward(x)
        else:
            x = intercept.enter_inputs(x)
            with intercept:
                y = microbatch.forward(x)
            y = map_tensors(y, intercept.bring)
            if (cut := microbatch.stage.cut) is not None:
                with intercept:
                    intercept.finish(cut.compute_loss(microbatch.i, y))
                y = ()
        self.end(microbatch)
        if self.step is not None:
            return y
        if microbatch.recording is not None and self.run.context.grad_enabled:
            microbatch.recording.watch_backward(y)
        return microbatch.stage.ends.leave(microbatch.i, y)

    def _copy_of(self, microbatch: MicroBatchForward, weight: nn.Parameter) -> Tensor:
        return self._parameter_copies.copy_of(microbatch.stage, microbatch.i, weight)

    def begin(self, microbatch: MicroBatchForward) -> None:
        """Begin the partition that has been handed off."""
        stage = microbatch.stage
        if stage.place.device.type == "cuda":
            torch.cuda.set_device(stage.place.device)
        stash(Stream(self.run.seed, stage.place.number(microbatch.i)))
        if microbatch.i < stage.recomputed:
            stage.layers.take_snapshot()
            hooks = self.run.context.saved_tensor_hooks
            microbatch.checkpointed = CheckpointedCalls(stage.layers, microbatch.i, hooks)
            if self.step is not None:
                self.checkpointed[microbatch.i, stage.place.j] = microbatch.checkpointed
        if microbatch.intercept is not None:
            microbatch.intercept.begin(stage, microbatch.checkpointed)
        if microbatch.recording is not None:
            microbatch.recording.begin(stage)
        if self._inspection is not None and microbatch.i == 0 and not stage.place.is_last:
            self._inspection.begin(stage.place.j)

    def end(self, microbatch: MicroBatchForward) -> None:
        """End the partition that is about to be handed back."""
        if self._inspection is not None:
            self._inspect(self._inspection, microbatch.i, microbatch.stage.place)
        if microbatch.recording is not None:
            microbatch.recording.end()
        if microbatch.checkpointed is not None:
            microbatch.checkpointed.end()
            microbatch.checkpointed = None
        if microbatch.intercept is not None:
            with Paused(microbatch.intercept):
                microbatch.intercept.end()

    def _inspect(self, inspection: Inspection, i: int, place: Place) -> None:
        if i > 0:
            inspection.compare()
            if place.is_last and i == place.m - 1:
                inspection.warn()
        elif not place.is_last:
            inspection.end(place.j)

    def call(
        self,
        microbatch: MicroBatchForward,
        layer: ModelLayer,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call a layer in the current partition."""
        intercept = microbatch.intercept
        if intercept is None:
            y = self._call(microbatch, layer, call, args, kwargs)
        else:
            with Paused(intercept):
                args, kwargs = intercept.bring_all(args, kwargs)
                y = self._call(microbatch, layer, call, args, kwargs)
                intercept.settle(y)
        if microbatch.recording is not None:
            microbatch.recording.note_layer(layer.module)
        return y

    def _call(
        self,
        microbatch: MicroBatchForward,
        layer: ModelLayer,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        stage = microbatch.stage
        microbatch.called += 1
        if self._moves:
            self.layers.move_on_first_call(layer, stage)
        if self._parameter_copies.is_needed:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)]
            call = self._parameter_copies.wrap(stage, microbatch.i, [layer.module, *given], call)
        number = microbatch.called * _CALLS + stage.place.number(microbatch.i) if self.draws else 0
        calls = microbatch.checkpointed
        # What works in place, in torch.utils.checkpoint or in a transform, keeps what it saves.
        if calls is not None and torch.is_grad_enabled() and not (
            layer.is_in_place or is_in_checkpoint() or is_transformed()
        ):
            if layer.partition != stage.place.j:
                stage.layers.take_snapshot(layer.module)
            stage.layers.refuse_replaced(layer.module)
            around = partial(_Drawing, self.run.seed, number) if self.draws else None
            return calls.call(layer.name, call, around, args, kwargs)
        # Here operations that draw take the stream's generator anyway (around).
        with Stream(self.run.seed, number) if self.draws else NOTHING:
            return call(*args, **kwargs)

    # In the caller.

    def finish(self) -> None:
        """End each ``forward`` and wait for them, however the run ended (H3)."""
        microbatches = list(self._microbatches.values())
        for microbatch in microbatches:
            microbatch.unwind()
        if not self.run.dropped:
            for microbatch in microbatches:
                microbatch.wait()
        self._inspection = None
        self._microbatches.clear()
        self.intercepts.clear()
        self.checkpointed.clear()


class _Drawing:
    """A block that draws the random numbers of one call. A class, since each call enters one."""

    __slots__ = ("_key", "_stream")

    def __init__(self, seed: RunSeed, number: int) -> None:
        self._stream = Stream(seed, number)

    def __enter__(self) -> None:
        self._key = DRAWING.included()
        self._stream.__enter__()
        self._key.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._key.__exit__(*error)
        self._stream.__exit__(*error)
