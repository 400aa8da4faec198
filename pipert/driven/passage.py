"""A passage: one micro-batch on its way through the model, and the hand-over of its turn.

The model's own ``forward`` runs once for each micro-batch, from beginning to end, on a driver
thread. It gets on while a worker lends it the turn, in ``F[i,j]`` of the plan's order::

    worker 0 (F[i,0])        driver of micro-batch i          worker 1 (F[i,1])
    -----------------        -----------------------          -----------------
    lend the turn    ----->  code before the first cut
    wait                     layers of partition 0
                     <-----  a layer of partition 1 is called
    F[i,0] is done           (worker 1 is told)       ----->  F[i,1] has its input
                             wait                     <-----  lend the turn
                             that layer, and what follows     wait
                             ... forward returns      ----->  F[i,1] is done, with the output

Worker 1 need not wait until worker 0 has woken up. Worker 0 tells it where there are observers, for
whom ``F[i,j]`` ends before ``F[i,j+1]`` begins.

Guarantees:

* **H1** a driver executes only between the loan of a turn and its return. Each loan is returned
  once, whatever the ``forward`` raises, and whoever is not waiting for it any more. A driver that
  is ended from outside returns it, too, and a dead one is noticed.
* **H2** partitions go on and never back: partition *j* begins when its cut is called, and a layer
  runs where the micro-batch is, whatever its home. ``F[i,j]`` lends its turn if the micro-batch
  waits for partition *j*; if it waits for a later one, or has ended, ``F[i,j]`` has nothing to do.
* **H3** an error is raised by the ``F`` that has lent the turn. The passages that nobody will lend
  a turn to any more are unwound: what their ``forward`` waits in raises :class:`Unwound`, which is
  no ``Exception``; what catches that is unwound again at its next layer. When the call returns,
  raises or is interrupted, all have ended (**R2**), but
  for those of a run that was given up while one is in the middle of a turn: that one is unwound
  when it comes to wait, and its worker is busy until then.
* **H4** a driver at rest references nothing of its last passage, and has none of its context on:
  one whose passage was broken off ends, since nobody knows what is on then.
* **H5** drivers end with the pipe, and when it is closed. A forked child starts its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from torch import nn

from pipert._typing import Value
from pipert.batch.microbatch import Arguments
from pipert.driven.crossing import Crossing
from pipert.driven.layers import Layer, Layers
from pipert.driven.loans import SENT, Loans
from pipert.driven.recorded import Seen
from pipert.driven.tape import Tape
from pipert.errors import PipeClosedError, PipertError, add_note
from pipert.layers.intercepted import here
from pipert.queues.latch import Latch
from pipert.queues.once import Once
from pipert.schedules.action import FORWARD, Action
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.workers.worker import NOT_RUN, WorkerThread

__all__: list[str] = []

_LOOK = 0.5  # s; how often who waits for a driver looks whether it is alive


class Unwound(BaseException):
    """Raised inside of a ``forward`` whose run is over, to end it."""


class Journey(Protocol):
    """What a passage needs of its journey: what happens where."""

    run: Run
    n: int
    module: nn.Module
    layers: Layers
    binds: bool

    def around(self) -> AbstractContextManager[None]:
        """What is on from the beginning of a passage to its end."""

    def pass_through(self, passage: Passage, x: Value) -> Value:
        """Go through the model; return what is sent at the end."""

    def begin(self, passage: Passage, stage: Stage) -> None:
        """The turn of a partition has come."""

    def end(self, passage: Passage, stage: Stage) -> None:
        """The turn of a partition goes back."""

    def call(
        self, passage: Passage, layer: Layer, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a layer, in the partition that is current."""

    def rests(self, passage: Passage) -> None:
        """The passage has ended."""


class Passage:
    """Micro-batch ``i`` of a journey: the task of a driver."""

    def __init__(self, journey: Journey, i: int, x: Value) -> None:
        self.what = journey.run.number, None
        self.layers_took: float | None = None
        self.i = i
        self._pid = os.getpid()
        self.j = 0
        """The partition that it is in, or waits for; *n* when it has ended."""
        self.driver: WorkerThread | None = None
        """The thread that it is on."""
        self.was_broken_off = True
        self._journey = journey
        self._x = x
        self.crossing: Crossing | None = None
        self.tape: Tape | None = None
        """Of the partition that it is in, if the micro-batch is checkpointed."""
        self.seen: Seen | None = None
        """If it is recorded."""
        self.calls = 0  # of layers
        self._stage: Stage | None = None
        self._loans = Loans(journey.n, journey.binds)
        self._ended = Latch(1)
        self._unsettled = Once((self.i,))
        self._is_inside = False

    # On a worker.

    def lend(self, stage: Stage) -> Value:
        """Lend the turn for ``F[i,j]``, and wait until it is returned (H1, H2).

        Returns the output of the model, if it came to its end; else an empty tuple, or ``SENT``.
        """
        if self.j > stage.place.j:
            return ()
        started = perf_counter()
        if self.driver is not None and self.j > 0:
            self._loans.bind(self.driver)
        try:
            return self._loans.lend(stage, self._is_lost)
        finally:
            stage.layers.took = perf_counter() - started

    def wake(self, driver: WorkerThread) -> None:
        """Let a driver that is idle take it."""
        self._loans.bind(driver)
        driver.in_queue.put(self)

    def _is_lost(self) -> bool:
        """Whether nobody returns a turn any more: it has ended, or its driver could not say so."""
        driver = self.driver
        return self._ended.is_open() or driver is None or not driver.is_alive()

    # In the caller, when the run is over.

    def unwind(self) -> None:
        """Let it end: nobody lends it a turn any more. Any thread; again: no-op."""
        self._loans.end()

    def wait(self) -> None:
        """Wait until it has ended, and keep nothing of it."""
        while not self._ended.wait(_LOOK) and not self._is_lost():
            pass
        self._loans.drop()  # an error that nobody took, whose frames reference this

    # On its driver.

    def receive(self, before_waiting: Callable[[], None]) -> Any:
        stage = self._loans.take()
        return NOT_RUN if stage is None else stage

    def execute(self, stage: Stage) -> Any:
        self._stage = stage
        context = self._journey.run.context
        try:
            with context.on_worker:
                value = context.variables.copy().run(self._pass)
            self.was_broken_off = False
        except Unwound:  # nobody is interested, but for a worker that was about to lend its turn
            self._fail(PipeClosedError("the pipe was closed during the call"))
        except BaseException as error:  # noqa: B036  raised on the worker
            self._fail(error)
        else:
            self._loans.give_back(self._journey.n - 1, value)
            self.j, self._stage = self._journey.n, None
        return ()

    def _fail(self, error: BaseException) -> None:
        # It may come from outside while one turn is returned and the next is lent: both workers get
        # it, and what nobody waits for is dropped.
        stage, self._stage = self._stage, None
        for j in {self.j} if stage is None else {self.j, stage.place.j}:
            if j < self._journey.n:
                self._loans.fail(j, error)

    def _pass(self) -> Value:
        here.interceptor = self
        try:
            with self._journey.around():
                return self._through_the_model()
        finally:
            here.interceptor = None
            if self.seen is not None:
                self.seen.end()

    def _through_the_model(self) -> Value:
        journey = self._journey
        x, self._x = self._x, None
        try:
            return journey.pass_through(self, x)
        except BaseException as error:
            if self._stage is not None:
                self._stage.place.note(error, Action(FORWARD, self.i, self.j))
            if type(error).__module__.startswith("torch._dynamo"):
                add_note(error, lambda: _COMPILED)
            raise

    def forward(self, x: Value) -> Value:
        """Call the model, and come to the last partition with what it returns."""
        module = self._journey.module
        y = module(*x.args, **x.kwargs) if isinstance(x, Arguments) else module(x)
        if self.j < self._journey.n - 1:
            self._hand_over(self._journey.n - 1)
        return y

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a layer, in its partition if that comes later."""
        journey = self._journey
        layer = journey.layers.get(module)
        if self._is_inside or layer is None:
            return call(*args, **kwargs)
        if layer.begins > self.j:
            self._hand_over(layer.begins)
        elif self._stage is None:
            raise Unwound  # the model has caught the last one
        self._is_inside = True
        try:
            return journey.call(self, layer, call, args, kwargs)
        except BaseException as error:
            add_note(error, partial(self._note_of_call, layer, args, kwargs))
            raise
        finally:
            self._is_inside = False

    def _note_of_call(self, layer: Layer, args: Any, kwargs: Any) -> str:
        return self.stage.layers.note_of_call(self.i, layer.name, args, kwargs)

    def _hand_over(self, j: int) -> None:  # and wait for the turn of partition j
        if os.getpid() != self._pid:  # P5: nobody lends a turn there
            raise PipertError("a child that was forked in a forward cannot go on through the pipe")
        stage = self.stage
        self._journey.end(self, stage)
        tell = None if stage.run.told.is_observed else partial(stage.links.y.send, self.i, ())
        try:
            self.j = j
            self._loans.give_back(stage.place.j, SENT if tell else (), tell)
            self._stage = None
            self._stage = self._loans.take()
        except BaseException as error:  # from outside; the model may catch it
            self._fail(error)
            raise
        self._journey.begin(self, self.stage)

    @property
    def stage(self) -> Stage:
        """The stage that has lent the turn."""
        if self._stage is None:
            raise Unwound
        return self._stage

    def send(self, result: Any) -> None:
        self._settle()

    def abandon(self, error: BaseException) -> None:
        """Its driver was ended from outside, or would not take it."""
        self._fail(error)
        self._settle()

    def _settle(self) -> None:
        if self._unsettled.take() is not None:
            self.crossing = self.tape = self.seen = None
            self._journey.rests(self)
            self._ended.arrive()

    def __repr__(self) -> str:
        return f"<Passage of micro-batch {self.i}, at partition {self.j}>"


_COMPILED = (
    "if torch.compile has made a function that the model's own code calls between its layers: "
    "nothing is brought to the device of a partition for it; make it a module, or leave it "
    "uncompiled"
)
