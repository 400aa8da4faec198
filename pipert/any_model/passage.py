"""A passage: one micro-batch on its way through the model, from partition to partition.

The model's own ``forward`` runs once for each micro-batch, from beginning to end, on a driver
thread. It proceeds only while a worker lends it the turn, which ``F[i,j]`` does in the plan's
order::

    worker 0 (F[i,0])        driver of micro-batch i          worker 1 (F[i,1])
    -----------------        -----------------------          -----------------
    lend the turn    ----->  code before the first cut
    wait                     layers of partition 0
                     <-----  a layer of partition 1 is called
    F[i,0] is done           (worker 1 is notifier)       ----->  F[i,1] has its input
                             wait                     <-----  lend the turn
                             that layer, and what follows     wait
                             ... forward returns      ----->  F[i,1] is done, with the output

The driver itself tells worker 1, which need not wait until worker 0 has woken up. Only if there are
observers does worker 0 tell it: they see ``F[i,j]`` end before ``F[i,j+1]`` begins.

Guarantees:

* **H1** a driver executes only between the loan of a turn and its return. Each loan is returned
  once, whatever the ``forward`` raises, and even if the worker no longer waits. A driver that is
  ended from outside returns it too, and a dead one is noticed.
* **H2** a passage never goes back: partition *j* begins when its cut is called, and a layer runs in
  the partition that is current, whatever its home. ``F[i,j]`` lends its turn if the passage waits
  for partition *j*; if it waits for a later one, or has ended, ``F[i,j]`` has nothing to do.
* **H3** an error is raised by the ``F`` that has lent the turn. Passages that will be lent no
  further turn are unwound: the call in which their ``forward`` waits raises :class:`Unwound`, which
  is no ``Exception``; code that catches it is unwound again at its next layer. When the call
  returns, raises or is interrupted, all passages have ended (**R2**), except in a run that was
  given up while a passage was in the middle of a turn: that passage is unwound at its next wait,
  and its worker is busy until then.
* **H4** an idle driver references nothing of its last passage, and none of its context is in
  effect. A driver whose passage was broken off ends, since the state of its context is unknown.
* **H5** drivers end with the pipe, and when it is closed. A forked child starts its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import nn

from pipert._typing import Value
from pipert.any_model.crossing import Crossing
from pipert.any_model.layers import Layer, Layers
from pipert.any_model.loans import POLL, SENT, Loans
from pipert.any_model.recorded import Recording
from pipert.any_model.tape import Tape
from pipert.batch.microbatch import Arguments
from pipert.errors import PipeClosedError, PipertError, add_note
from pipert.layers.intercepted import here
from pipert.queues.latch import Latch
from pipert.queues.once import Once
from pipert.schedules.action import FORWARD, Action
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.workers.worker import NOT_RUN, WorkerThread

__all__: list[str] = []


class Unwound(BaseException):
    """Raised inside a ``forward`` whose run is over, to end it."""


class Journey(Protocol):
    """What a passage needs from its journey."""

    run: Run
    n: int
    module: nn.Module
    layers: Layers

    def pass_through(self, passage: Passage, x: Value) -> Value:
        """Run the model; return what the last stage sends."""

    def begin(self, passage: Passage) -> None:
        """Begin the partition whose turn has been lent."""

    def end(self, passage: Passage) -> None:
        """End the partition whose turn is about to be returned."""

    def call(
        self, passage: Passage, layer: Layer, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a layer in the current partition."""


class Passage:
    """Micro-batch ``i`` on its way through the model: the ``Task`` of a driver."""

    def __init__(
        self, journey: Journey, i: int, x: Value, release: Callable[[Passage], None]
    ) -> None:
        self.what = journey.run.number, None
        self.i = i
        self._pid = os.getpid()
        self.j = 0
        """The partition that it is in or waits for; *n* once ``forward`` has returned."""
        self.driver: WorkerThread | None = None
        self.was_broken_off = True
        self._journey = journey
        self._x = x
        self._release = release  # takes back the driver
        self.crossing: Crossing | None = None
        self.tape: Tape | None = None
        """The tape of the current partition, if the micro-batch is checkpointed."""
        self.recording: Recording | None = None
        """Set if the run is recorded."""
        self.calls = 0  # of layers, so far
        self._stage: Stage | None = None
        self._loans = Loans(journey.n)
        self._ended = Latch(1)
        self._unsettled = Once((self.i,))
        self._is_in_layer = False

    # On a worker.

    def lend(self, stage: Stage) -> Value:
        """Lend the turn for ``F[i,j]``, and wait until it is returned (H1, H2).

        Returns the model's output if ``forward`` has returned; else an empty tuple, or ``SENT``.
        """
        if self.j > stage.place.j:
            return ()
        return self._loans.lend(stage, self._is_lost)

    def _is_lost(self) -> bool:
        """Return whether no turn can be returned: the passage has ended, or its driver is dead."""
        driver = self.driver
        return self._ended.is_open() or driver is None or not driver.is_alive()

    # In the caller, when the run is over.

    def unwind(self) -> None:
        """End the passage: no further turn is lent. Thread-safe; a second call does nothing."""
        self._loans.end()

    def wait(self) -> None:
        """Wait until the passage has ended, and discard what it left behind."""
        while not self._ended.wait(POLL) and not self._is_lost():
            pass
        self._loans.drop()  # an error that no worker received: its frames reference this

    # On its driver.

    def receive(self) -> Any:
        stage = self._loans.take()
        return NOT_RUN if stage is None else stage

    def execute(self, stage: Stage) -> Any:
        self._stage = stage
        context = self._journey.run.context
        try:
            with context.on_worker:
                value = context.variables.copy().run(self._run)
            self.was_broken_off = False
        except Unwound:  # received only by a worker that was just about to lend its turn
            self._fail(PipeClosedError("the pipe was closed during the call"))
        except BaseException as error:  # noqa: B036  raised again on the worker
            self._fail(error)
        else:
            self._loans.give_back(self._journey.n - 1, value)
            self.j, self._stage = self._journey.n, None
        return ()

    def _fail(self, error: BaseException) -> None:
        # An error from outside may come between the return of one turn and the loan of the next:
        # both workers get it, and if one of them does not wait, its copy is dropped.
        stage, self._stage = self._stage, None
        for j in {self.j} if stage is None else {self.j, stage.place.j}:
            if j < self._journey.n:
                self._loans.fail(j, error)

    def _run(self) -> Value:
        x, self._x = self._x, None
        here.interceptor = self
        try:
            return self._journey.pass_through(self, x)
        except BaseException as error:
            if self._stage is not None:
                self._stage.place.note(error, Action(FORWARD, self.i, self.j))
            if type(error).__module__.startswith("torch._dynamo"):
                add_note(error, lambda: _COMPILED)
            raise
        finally:
            here.interceptor = None
            if self.recording is not None:
                self.recording.end()

    def forward(self, x: Value) -> Value:
        """Call the model, go on to the last partition, and return the output."""
        module = self._journey.module
        y = module(*x.args, **x.kwargs) if isinstance(x, Arguments) else module(x)
        if self.j < self._journey.n - 1:
            self._hand_over(self._journey.n - 1)
        return y

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a layer; if it is the cut of a later partition, go on to that first."""
        journey = self._journey
        layer = journey.layers.get(module)
        if self._is_in_layer or layer is None:
            return call(*args, **kwargs)
        if layer.begins > self.j:
            self._hand_over(layer.begins)
        elif self._stage is None:
            raise Unwound  # again: the model has caught the last one
        self._is_in_layer = True
        try:
            return journey.call(self, layer, call, args, kwargs)
        except BaseException as error:
            layers = self.stage.layers
            add_note(error, partial(layers.note_of_call, self.i, layer.name, args, kwargs))
            raise
        finally:
            self._is_in_layer = False

    def _hand_over(self, j: int) -> None:
        """Return the current turn, and wait for that of partition ``j``."""
        if os.getpid() != self._pid:  # P5: no worker lends a turn there
            raise PipertError("a child that was forked in a forward cannot go on through the pipe")
        stage = self.stage
        self._journey.end(self)
        try:
            self.j = j
            if stage.run.notifier.is_observed:
                self._loans.give_back(stage.place.j, ())
            else:
                stage.links.y.send(self.i, ())
                self._loans.give_back(stage.place.j, SENT)
            self._stage = None
            self._stage = self._loans.take()
        except BaseException as error:  # from outside, and the model may catch it
            self._fail(error)
            raise
        self._journey.begin(self)

    @property
    def stage(self) -> Stage:
        """The stage that has lent the current turn."""
        if self._stage is None:
            raise Unwound
        return self._stage

    def send(self, result: Any) -> None:
        self._settle()

    def abandon(self, error: BaseException) -> None:
        """Fail with ``error``: the driver was ended from outside, or never took the passage."""
        self._fail(error)
        self._settle()

    def _settle(self) -> None:
        if self._unsettled.take() is not None:
            self.crossing = self.tape = self.recording = None
            self._release(self)
            self._ended.arrive()

    def __repr__(self) -> str:
        return f"<Passage of micro-batch {self.i}, at partition {self.j}>"


_COMPILED = (
    "if torch.compile has made a function that the model's own code calls between its layers: "
    "nothing is brought to the device of a partition for it; make it a module, or leave it "
    "uncompiled"
)
