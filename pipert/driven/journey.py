"""A journey: what the passages of one run share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.autograd.leaves import begin_numbers, node_count
from pipert.driven.crossing import Crossing
from pipert.driven.drivers import Drivers
from pipert.driven.layers import Layer, Layers
from pipert.driven.lending import Lending
from pipert.driven.moving import Moves
from pipert.driven.passage import Passage
from pipert.driven.recorded import Seen
from pipert.driven.shared import Look, SharedState
from pipert.driven.swapped import swapped
from pipert.driven.tape import Tape
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.buffers import KEEPING, kept_counters
from pipert.layers.dispatch_keys import stash
from pipert.layers.generators import DRAWING
from pipert.layers.nested_checkpoint import is_in_checkpoint
from pipert.layers.random_numbers import RunSeed, Stream
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.stage.step import Step
from pipert.workers.context import is_transformed

__all__: list[str] = []


_CALLS = 1 << 32  # more than tasks of a run


class Journey:
    """What the passages of one run share. Made in the caller."""

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
        # The numbers of nodes below that are the caller's, and the turns of micro-batches (order).
        self._below = max(node_count(), run.plan.m)
        self.draws = False
        """Whether any layer might draw random numbers: where it is called is not known."""
        self.stats: PartitionStats | None = None
        """Of the whole model, if they are deferred; a layer's notes come from one worker each."""
        self._moves = {device.type for device in run.devices} != {"cpu"}  # arguments, if no more
        self.binds = not self._moves
        self._lending = Lending(module, step is not None, self._moves)
        self._drivers = drivers
        several = run.plan.m > 1 and self.n > 1
        self._look: Look | None = shared.look() if several else None
        self.crossings: dict[int, Crossing] = {}
        self.tapes: dict[tuple[int, int], Tape] = {}
        """In a step, until they were recomputed."""
        self._passages: dict[int, Passage] = {}

    # On workers.

    def lend(self, stage: Stage, i: int, x: Value) -> Value:
        """Lend micro-batch ``i`` the turn of a stage; the first one gets the input."""
        if stage.place.j == 0:
            passage = self._passages[i] = Passage(self, i, x)
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
        """What is on from the beginning of a passage to its end."""
        notes = _NOTHING if self.stats is None else self.stats.collecting()
        try:
            # The model's own code may draw. Inside of a layer that another pipe recomputes, buffers
            # stay as they are.
            keeping = _NOTHING if kept_counters.get() is None else KEEPING.included()
            # What it asks gradients of makes nodes with numbers of this thread, on GPUs, too.
            cuts = self.step is not None and self._moves
            numbers = torch.autograd.set_multithreading_enabled(False) if cuts else _NOTHING
            with DRAWING.included(), keeping, notes, numbers:
                yield
        finally:
            stash(None)  # torch would drop it when the thread ends, maybe after the interpreter

    def pass_through(self, passage: Passage, x: Value) -> Value:
        """Let micro-batch ``i`` go through the model; return what is sent at the end."""
        begin_numbers(self._below)
        if self.run.told.recorder is not None:
            passage.seen = Seen(passage.i, self.run.told, self.layers)
        if self.step is not None or self._moves:
            moves = Moves(passage.i, self.run, self._lending) if self._moves else None
            lends = partial(self._lent, passage) if self._lending.is_needed else None
            passage.crossing = Crossing(self.step is not None, moves, lends)
            if self.step is not None:
                self.crossings[passage.i] = passage.crossing
        self.begin(passage, passage.stage)
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
        self.end(passage, passage.stage)
        if self.step is not None:
            return y
        if passage.seen is not None and self.run.context.grad_enabled:
            passage.seen.watch_backward(y)
        return passage.stage.ends.leave(passage.i, y)

    def _lent(self, passage: Passage, weight: nn.Parameter) -> Tensor:
        """What stands for a parameter in the partition that is current."""
        stage = passage.stage
        if not self._lending.is_lent(stage, weight):
            return weight
        return self._lending.of(stage, passage.i, weight)

    def begin(self, passage: Passage, stage: Stage) -> None:
        """The turn of a partition has come."""
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
        if passage.seen is not None:
            passage.seen.begin(stage)
        look, j = self._look, stage.place.j
        if look is not None and passage.i == 0 and j < self.n - 1:
            look.begin(j)

    def end(self, passage: Passage, stage: Stage) -> None:
        """The turn of a partition goes back."""
        if self._look is not None:
            self._compare(self._look, passage, stage)
        if passage.seen is not None:
            passage.seen.end()
        if passage.tape is not None:
            passage.tape.end()
            passage.tape = None
        if passage.crossing is not None:
            with passage.crossing.outside_of_glue():
                passage.crossing.end()

    def _compare(self, look: Look, passage: Passage, stage: Stage) -> None:
        if passage.i > 0:
            look.compare()
            if (passage.i, stage.place.j) == (self.run.plan.m - 1, self.n - 1):
                look.warn()
        elif stage.place.j < self.n - 1:
            look.end(stage.place.j)

    def call(
        self, passage: Passage, layer: Layer, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a layer, in the partition that is current."""
        crossing = passage.crossing
        if crossing is None:
            y = self._call(passage, layer, call, args, kwargs)
        else:
            with crossing.outside_of_glue():
                args, kwargs = crossing.bring_all(args, kwargs)
                y = self._call(passage, layer, call, args, kwargs)
                crossing.settle(y)
        if passage.seen is not None:
            passage.seen.note_layer(layer.module)
        return y

    def _call(
        self, passage: Passage, layer: Layer, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        stage = passage.stage
        passage.calls += 1
        if self._moves:
            self.layers.settle(layer, stage)
        if self._lending.is_needed:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)]
            call = self._lending.around(stage, passage.i, [layer.module, *given], call)
        number = passage.calls * _CALLS + stage.place.number(passage.i) if self.draws else 0
        tape = passage.tape
        if tape is not None and torch.is_grad_enabled() and not (
            layer.is_in_place or is_in_checkpoint() or is_transformed()  # what it needs is kept
        ):
            if layer.partition != stage.place.j:
                stage.layers.take_snapshot(layer.module)
            stage.layers.refuse_replaced(layer.module)
            around = partial(_Drawing, self.run.seed, number) if self.draws else None
            return tape.call(layer.name, call, around, args, kwargs)
        # What draws is given a generator on drivers anyway (around).
        with Stream(self.run.seed, number) if self.draws else _NOTHING:
            return call(*args, **kwargs)

    def rests(self, passage: Passage) -> None:
        self._drivers.rests(passage)

    # In the caller.

    def over(self) -> None:
        """The run is over, in whatever way: let all passages end, and wait for them (H3)."""
        passages = list(self._passages.values())
        for passage in passages:
            passage.unwind()
        if not self.run.dropped:
            for passage in passages:
                passage.wait()
        self._look = None
        self._passages.clear()
        self.crossings.clear()
        self.tapes.clear()


class _Drawing:
    """A block whose operations draw the random numbers of one call. For each, so no generator."""

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


_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()
