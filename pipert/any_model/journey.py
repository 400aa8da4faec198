"""A journey: what the passages of one run share, and what happens to each on its way.

A passage decides when its turn begins and ends, and which calls are calls of layers; here is what
is done then: devices, random numbers, tapes, crossings, recordings.
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
from pipert.any_model.crossing import Crossing
from pipert.any_model.drivers import Drivers
from pipert.any_model.layers import Layer, Layers
from pipert.any_model.lending import Lending
from pipert.any_model.moving import Moves
from pipert.any_model.passage import Passage
from pipert.any_model.recorded import Recording
from pipert.any_model.shared import Inspection, SharedState
from pipert.any_model.swapped import swapped
from pipert.any_model.tape import Tape
from pipert.autograd.leaves import begin_numbers
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


class Journey:
    """The state that the passages of one run share. Made by the caller."""

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        layers: Layers,
        drivers: Drivers,
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
        self._lending = Lending(module, step is not None, self._moves)
        self._drivers = drivers
        several = run.plan.m > 1 and self.n > 1
        self._inspection: Inspection | None = shared.begin_run() if several else None
        self.crossings: dict[int, Crossing] = {}
        self.tapes: dict[tuple[int, int], Tape] = {}
        """Those of a step, until they are recomputed."""
        self._passages: dict[int, Passage] = {}

    # On workers.

    def lend(self, stage: Stage, i: int, x: Value) -> Value:
        """Lend micro-batch ``i`` the turn of ``stage``. In partition 0, start its passage first."""
        if stage.place.j == 0:
            passage = self._passages[i] = Passage(self, i, x, self._drivers.release)
            self._drivers.start(passage)
        passage = self._passages[i]
        worker: Any = threading.current_thread()
        worker.lends_to = passage.driver
        try:
            return passage.lend(stage)
        finally:
            worker.lends_to = None

    # On drivers.

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Put a passage into its context, from its beginning to its end."""
        notes = NOTHING if self.stats is None else self.stats.collecting()
        try:
            # Glue may draw random numbers. Inside a layer that another pipe recomputes, buffers
            # stay as they are.
            keeping = NOTHING if kept_counters.get() is None else KEEPING.included()
            # Gradients that glue asks for make nodes on this thread, with its numbers, on GPUs too.
            cuts = self.step is not None and self._moves
            numbers = torch.autograd.set_multithreading_enabled(False) if cuts else NOTHING
            with DRAWING.included(), keeping, notes, numbers:
                yield
        finally:
            stash(None)  # else torch drops it when the thread ends, maybe after the interpreter

    def pass_through(self, passage: Passage, x: Value) -> Value:
        """Run the model on micro-batch ``i``; return what the last stage sends."""
        with self.around():
            return self._pass_through(passage, x)

    def _pass_through(self, passage: Passage, x: Value) -> Value:
        begin_numbers(self._first_node)
        if self.run.notifier.recorder is not None:
            passage.recording = Recording(passage.i, self.run.notifier, self.layers)
        if self.step is not None or self._moves:
            moves = Moves(passage.i, self.run, self._lending) if self._moves else None
            lends = partial(self._stand_in_for, passage) if self._lending.is_needed else None
            passage.crossing = Crossing(self.step is not None, moves, lends)
            if self.step is not None:
                self.crossings[passage.i] = passage.crossing
        self.begin(passage)
        crossing = passage.crossing
        if crossing is None:
            y = passage.forward(x)
        else:
            x = crossing.enter_inputs(x)
            with crossing:
                y = passage.forward(x)
            y = swapped(y, crossing.bring)
            if (cut := passage.stage.cut) is not None:
                with crossing:
                    crossing.finish(cut.compute_loss(passage.i, y))
                y = ()
        self.end(passage)
        if self.step is not None:
            return y
        if passage.recording is not None and self.run.context.grad_enabled:
            passage.recording.watch_backward(y)
        return passage.stage.ends.leave(passage.i, y)

    def _stand_in_for(self, passage: Passage, weight: nn.Parameter) -> Tensor:
        return self._lending.stand_in_for(passage.stage, passage.i, weight)

    def begin(self, passage: Passage) -> None:
        """Begin the partition whose turn has been lent."""
        stage = passage.stage
        if stage.place.device.type == "cuda":
            torch.cuda.set_device(stage.place.device)
        stash(Stream(self.run.seed, stage.place.number(passage.i)))
        if passage.i < stage.recomputed:
            stage.layers.take_snapshot()
            hooks = self.run.context.saved_tensor_hooks
            passage.tape = Tape(stage.layers, passage.i, hooks)
            if self.step is not None:
                self.tapes[passage.i, stage.place.j] = passage.tape
        if passage.crossing is not None:
            passage.crossing.begin(stage, passage.tape)
        if passage.recording is not None:
            passage.recording.begin(stage)
        if self._inspection is not None and passage.i == 0 and not stage.place.is_last:
            self._inspection.begin(stage.place.j)

    def end(self, passage: Passage) -> None:
        """End the partition whose turn is about to be returned."""
        if self._inspection is not None:
            self._inspect(self._inspection, passage.i, passage.stage.place)
        if passage.recording is not None:
            passage.recording.end()
        if passage.tape is not None:
            passage.tape.end()
            passage.tape = None
        if passage.crossing is not None:
            with passage.crossing.outside_of_glue():
                passage.crossing.end()

    def _inspect(self, inspection: Inspection, i: int, place: Place) -> None:
        if i > 0:
            inspection.compare()
            if place.is_last and i == place.m - 1:
                inspection.warn()
        elif not place.is_last:
            inspection.end(place.j)

    def call(
        self, passage: Passage, layer: Layer, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a layer in the current partition."""
        crossing = passage.crossing
        if crossing is None:
            y = self._call(passage, layer, call, args, kwargs)
        else:
            with crossing.outside_of_glue():
                args, kwargs = crossing.bring_all(args, kwargs)
                y = self._call(passage, layer, call, args, kwargs)
                crossing.settle(y)
        if passage.recording is not None:
            passage.recording.note_layer(layer.module)
        return y

    def _call(
        self, passage: Passage, layer: Layer, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        stage = passage.stage
        passage.calls += 1
        if self._moves:
            self.layers.move_on_first_call(layer, stage)
        if self._lending.is_needed:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)]
            call = self._lending.wrap(stage, passage.i, [layer.module, *given], call)
        number = passage.calls * _CALLS + stage.place.number(passage.i) if self.draws else 0
        tape = passage.tape
        # What works in place, in torch.utils.checkpoint or in a transform, keeps what it saves.
        if tape is not None and torch.is_grad_enabled() and not (
            layer.is_in_place or is_in_checkpoint() or is_transformed()
        ):
            if layer.partition != stage.place.j:
                stage.layers.take_snapshot(layer.module)
            stage.layers.refuse_replaced(layer.module)
            around = partial(_Drawing, self.run.seed, number) if self.draws else None
            return tape.call(layer.name, call, around, args, kwargs)
        # On drivers operations that draw take the stream's generator anyway (around).
        with Stream(self.run.seed, number) if self.draws else NOTHING:
            return call(*args, **kwargs)

    # In the caller.

    def finish(self) -> None:
        """End all passages and wait for them, however the run ended (H3)."""
        passages = list(self._passages.values())
        for passage in passages:
            passage.unwind()
        if not self.run.dropped:
            for passage in passages:
                passage.wait()
        self._inspection = None
        self._passages.clear()
        self.crossings.clear()
        self.tapes.clear()


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
