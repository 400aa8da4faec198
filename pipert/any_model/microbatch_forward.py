"""One micro-batch on its way through the model, from partition to partition.

The model's own ``forward`` runs once for each micro-batch, from beginning to end, on a thread of
its own. It proceeds only while a worker hands off its partition to it, which ``F[i,j]`` does in the
plan's order::

    worker 0 (F[i,0])        thread of micro-batch i          worker 1 (F[i,1])
    -----------------        -----------------------          -----------------
    hand off         ----->  code before the first cut
    wait                     layers of partition 0
                     <-----  a layer of partition 1 is called
    F[i,0] is done           (worker 1 is told)      ----->   F[i,1] has its input
                             wait                    <-----   hand off
                             that layer, and what follows     wait
                             ... forward returns     ----->   F[i,1] is done, with the output

The thread itself tells worker 1, which need not wait until worker 0 has woken up.

Guarantees:

* **H1** a micro-batch thread executes only between a hand-off and its return. Each partition is
  handed back once, whatever the ``forward`` raises, and even if the worker no longer waits. A
  thread that is ended from outside hands it back too, and a dead one is noticed.
* **H2** a micro-batch never goes back: partition *j* begins when its cut is called, and a layer
  runs in the partition that is current, whatever its home. ``F[i,j]`` hands off if the micro-batch
  waits for partition *j*; if it waits for a later one, or has ended, ``F[i,j]`` does nothing.
* **H3** an error is raised by the ``F`` that has handed off. A ``forward`` that will get no further
  partition is unwound: the call in which it waits raises :class:`Unwound`, which is no
  ``Exception``. If model code catches it, the next call of a layer raises it again. When the call
  returns, raises or is interrupted, each ``forward`` has ended (**R2**), except in a run that was
  given up while a ``forward`` was in the middle of a partition: it is unwound at its next wait, and
  its worker is busy until then.
* **H4** an idle micro-batch thread references nothing of its last micro-batch, and none of its
  context is in effect. A thread whose ``forward`` was broken off ends, since the state of its
  context is unknown.
* **H5** micro-batch threads end with the pipe, and when it is closed. A forked child starts its
  own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch import nn

from pipert._typing import Value
from pipert.any_model.current_partition import CurrentPartition, ModelRun
from pipert.autograd.hooks import checkpoint_around
from pipert.batch.microbatch import Arguments, explain_mapping
from pipert.errors import (
    NestedCheckpointError,
    PipeClosedError,
    PipertError,
    WorkerDiedError,
    add_note,
)
from pipert.layers.intercepted import current_thread
from pipert.queues.closable import Once
from pipert.queues.locks import Latch
from pipert.recompute.public import begin_microbatch, end_microbatch
from pipert.schedules.action import FORWARD, Action
from pipert.stage.stage import SENT, Stage
from pipert.workers.worker import CHECK, NOT_RUN, WorkerThread

_HandedBack = SimpleQueue[tuple[Value, BaseException | None]]


class Unwound(BaseException):
    """Raised inside a ``forward`` whose run is over, to end it."""


class MicroBatchForward:
    """Micro-batch ``i`` on its way through the model: the ``Task`` of its thread."""

    def __init__(
        self, model_run: ModelRun, i: int, x: Value, release: Callable[[MicroBatchForward], None]
    ) -> None:
        self.what = model_run.run.number, Action(FORWARD, i, 0)
        self.i = i
        self._pid = os.getpid()
        self.j = 0
        """The partition that it is in or waits for; *n* once ``forward`` has returned."""
        self.thread: WorkerThread | None = None
        self.was_broken_off = True
        self._context = model_run.run.context
        self._function = model_run.run.function or model_run.module
        self._model, self._calls_of_model = model_run.module, 0
        self._layers = model_run.layers
        self._n = model_run.run.plan.n
        self._x = x
        self._release = release  # takes back the thread
        self._current = CurrentPartition(model_run, i)
        self._stage: Stage | None = None
        self._handed_off: SimpleQueue[Stage | None] = SimpleQueue()
        # One for each partition: the thread may hand back one, and be handed the next, before the
        # first worker has noticed.
        self._handed_back = [_HandedBack() for _ in range(self._n)]
        self._ended = Latch(1)
        self._unsettled = Once((self.i,))
        self._is_in_layer = False
        self._checkpoint: object = None  # around the last call of a layer

    # On a worker.

    def hand_off(self, stage: Stage) -> Value:
        """Hand off partition *j* for ``F[i,j]``, and wait until it is handed back (H1, H2).

        Returns the model's output if ``forward`` has returned; else an empty tuple, or ``SENT``.
        """
        if self.j > stage.place.j:
            return ()
        self._handed_off.put(stage)
        value, error = self._wait_for(self._handed_back[stage.place.j])
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait_for(self, handed_back: _HandedBack) -> tuple[Value, BaseException | None]:
        while True:
            try:
                return handed_back.get(timeout=CHECK)
            except Empty:
                pass
            if self._is_lost() and handed_back.empty():
                raise WorkerDiedError(
                    "the thread of a micro-batch was ended from outside during the call"
                )

    def _is_lost(self) -> bool:
        """Return whether nothing can be handed back: ``forward`` has ended, or its thread has."""
        thread = self.thread
        return self._ended.is_open() or thread is None or not thread.is_alive()

    # In the caller, when the run is over.

    def unwind(self) -> None:
        """End the ``forward``: nothing further is handed off. Thread-safe and idempotent."""
        self._handed_off.put(None)

    def wait(self) -> None:
        """Wait until the ``forward`` has ended, and discard what it left behind."""
        while not self._ended.wait(CHECK) and not self._is_lost():
            pass
        # An error that no worker received: its frames reference this.
        self._handed_back = [_HandedBack() for _ in self._handed_back]

    # On its thread.

    def receive(self) -> Any:
        stage = self._handed_off.get()
        return NOT_RUN if stage is None else stage

    def execute(self, stage: Stage) -> Any:
        self._stage = stage
        try:
            with self._context.on_worker:
                value = self._context.variables.copy().run(self._run, stage)
            self.was_broken_off = False
        except Unwound:  # received only by a worker that was just about to hand off
            self._fail(PipeClosedError("the pipe was closed during the call"))
        except BaseException as error:  # noqa: B036  raised again on the worker
            self._fail(error)
        else:
            self._hand_back(self._n - 1, value)
            self.j, self._stage = self._n, None
        return ()

    def _hand_back(self, j: int, value: Value) -> None:
        self._handed_back[j].put((value, None))

    def _fail(self, error: BaseException) -> None:
        # An error from outside may come between two hand-offs: both workers get it, and if one of
        # them does not wait, its copy is dropped.
        stage, self._stage = self._stage, None
        for j in {self.j} if stage is None else {self.j, stage.place.j}:
            if j < self._n:
                self._handed_back[j].put(((), error))  # kept if no worker waits

    def _run(self, stage: Stage) -> Value:
        x, self._x = self._x, None
        current_thread.interceptor, current_thread.around = self, self._layers.around
        begin_microbatch(self.i)
        try:
            return self._current.run(stage, self._forward, x)
        except BaseException as error:
            if self._stage is not None:
                self._stage.place.note(error, Action(FORWARD, self.i, self.j))
            if type(error).__module__.startswith("torch._dynamo"):
                add_note(error, lambda: _COMPILED)
            explain_mapping(error, x, self._function)
            raise
        finally:
            end_microbatch()
            current_thread.interceptor, current_thread.around = None, ()

    def _forward(self, x: Value) -> Value:
        """Call the model, go on to the last partition, and return the output."""
        function = self._function
        y = function(*x.args, **x.kwargs) if isinstance(x, Arguments) else function(x)
        if self.j < self._n - 1:
            self._go_on_to(self._n - 1)
        self._current_stage()
        return y

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a layer; if it is the cut of a later partition, go on to that first."""
        layer = self._layers.get(module)
        if self._is_in_layer or layer is None:
            if module is self._model:
                self._calls_of_model += 1
                if self._calls_of_model == 2 and self._n > 1:
                    warnings.warn(_CALLED_AGAIN, UserWarning, stacklevel=3)
            if module in self._layers.encoders:
                return self._current.call(None, call, args, kwargs)
            return call(*args, **kwargs)
        if self._context.grad_enabled and self.j < self._n - 1:
            before, self._checkpoint = self._checkpoint, checkpoint_around()
            if layer.begins > self.j and before is self._checkpoint is not None:
                raise NestedCheckpointError(_CUT_IN_CHECKPOINT.format(layer.name))
        if layer.begins > self.j:
            self._layers.begun.add(layer.begins)
            self._go_on_to(layer.begins)
        self._current_stage()
        self._is_in_layer = True
        try:
            return self._current.call(layer, call, args, kwargs)
        except BaseException as error:
            if self._stage is not None:
                note = self._stage.layers.note_of_call
                add_note(error, partial(note, self.i, layer.name, args, kwargs))
            raise
        finally:
            self._is_in_layer = False

    def _go_on_to(self, j: int) -> None:
        """Hand back the current partition, and wait for partition ``j``."""
        if os.getpid() != self._pid:  # P5: no worker hands off there
            raise PipertError("a child that was forked in a forward cannot go on through the pipe")
        stage = self._current_stage()
        self._current.end()
        try:
            self.j = j
            stage.handlers[FORWARD].send(self.i, ())
            self._hand_back(stage.place.j, SENT)
            self._stage = None
            self._stage = self._handed_off.get()
        except BaseException as error:  # from outside, and the model may catch it
            self._fail(error)
            raise
        self._current.begin(self._current_stage())

    def _current_stage(self) -> Stage:
        """Return the stage that has handed off; unwind, maybe again, if no other will."""
        if self._stage is None:
            raise Unwound
        return self._stage

    def send(self, result: Any) -> None:
        self._settle()

    def abandon(self, error: BaseException) -> None:
        """Fail with ``error``: the thread was ended from outside, or never took the micro-batch."""
        self._fail(error)
        self._settle()

    def _settle(self) -> None:
        if self._unsettled.take() is not None:
            self._current.clear()
            self._checkpoint = None
            self._release(self)
            self._ended.arrive()


_COMPILED = (
    "if torch.compile has made a function that the model's own code calls between its layers: "
    "nothing is brought to the device of a partition for it; make it a module, or leave it "
    "uncompiled"
)
_CALLED_AGAIN = (
    "the model is called again for the same micro-batch, which is in the last partition by then: "
    "all its layers run there, with their parameters copied to its device. Call it once, with the "
    "rows of both calls, if you can"
)
_CUT_IN_CHECKPOINT = (
    "the cut at {} is in the middle of a function that torch.utils.checkpoint runs, which would be "
    "repeated over two partitions; cut where such a function begins, or let the pipe checkpoint, "
    "with checkpoint='always' (transformers: model.gradient_checkpointing_disable())"
)
