"""Carries out the actions of one partition in one run.

A worker takes each action of a stage as a :class:`Task`: it receives the input from a link, calls
the function of ``actions`` that carries it out, and sends the result over a link.

Links end with their run. They never tell micro-batches apart: all stages have them in one order
(rule 4 of ``schedules.plan``), so a FIFO is enough. Only the inputs from the caller, who has them
all at once, are received by number.

The ends of a stage govern how values enter and leave it. Only they differ between a call and a
step:

============  ======================================  ==========================================
\\             ``CallBoundary``: a call                     ``StepBoundary``: a step
============  ======================================  ==========================================
Copy, Wait    nodes, whose backward goes back         copies of the value in ``F``, of the gradient
                                                      in ``B``; both on copy streams
Fork, Join    nodes that order the backward           none: the plan says what comes after what
Recompute     a node behind the outputs               ``R[i,j]``, an action
Checkpoint    a node that differentiates              the same node
              what Recompute has built
B[i,j]        autograd's walk along the graph         the engine's walk from the outputs of
                                                      the stage to its inputs and weights
============  ======================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from pipert._typing import Value
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.call import Layers
from pipert.layers.parameter_copies import ParameterCopies, Weights
from pipert.layers.place import Place
from pipert.queues.closable import ClosableQueue, Once
from pipert.recompute.public import begin_microbatch, end_microbatch
from pipert.schedules.action import BACKWARD, WEIGHT, Action
from pipert.skip.store import Carried, Key, Stashed
from pipert.stage.call_boundary import CallBoundary
from pipert.stage.run import Outcome, Run
from pipert.stage.shared_memory import Shared, find_shared
from pipert.stage.step_boundary import StepBoundary
from pipert.workers.worker import NOT_RUN

SENT = object()
"""Takes the place of a value that has been sent already, by whoever computed it."""


class Link(NamedTuple):
    """A link that carries one value per micro-batch."""

    send: Callable[[int, Value], None]
    """Sends the value of a micro-batch, or ``NOT_RUN``; ignores ``SENT``. Never blocks."""
    receive: Callable[[int], Value]
    """Waits for the value of a micro-batch. Returns ``NOT_RUN`` if there will be none."""
    close: Callable[[], object]
    """Wakes all who wait, and drops what is on its way. Thread-safe."""


NOWHERE = Link(lambda i, value: None, lambda i: (), lambda: None)
"""Discards what is sent, and delivers an empty tuple."""


def between() -> Link:
    """Return a link from one stage to the next: a queue."""
    queue: ClosableQueue[tuple[Value]] = ClosableQueue()  # a value may be None

    def send(i: int, value: Value) -> None:
        if value is not SENT:
            queue.put((value,))

    def receive(i: int) -> Value:
        (value,) = queue.get() or (NOT_RUN,)  # the run was given up
        return value

    return Link(send, receive, queue.drain)


def from_caller(inputs: list[Value]) -> Link:
    """Return a link to the first stage, which empties ``inputs`` as the run proceeds."""

    def receive(i: int) -> Value:
        value, inputs[i] = inputs[i], None
        return value

    return Link(NOWHERE.send, receive, inputs.clear)


def to_caller(outputs: list[Value]) -> Link:
    """Return a link from the last stage to ``outputs``, which the caller reads after the run."""
    return Link(lambda i, value: outputs.append(value), NOWHERE.receive, outputs.clear)


Execute = Callable[["Stage", int, Value], Value]


class Handler(NamedTuple):
    """How a stage carries out one kind of action."""

    receive: Callable[[int], Value]
    """Takes the micro-batch; waits for the action's input and returns it."""
    context: AbstractContextManager[None]
    """The context of ``execute``, beside the caller's context variables."""
    execute: Execute
    """Takes the stage, the micro-batch and the input; returns the result."""
    send: Callable[[int, Value], None]
    """Takes the micro-batch and the result, or ``NOT_RUN``. Never blocks."""


@dataclass(slots=True, eq=False, repr=False)
class Stage:
    """Partition *j* in one run.

    Used by its worker only, except :meth:`give_up` and ``Task.abandon``.
    """

    run: Run
    place: Place
    layers: Layers
    skips: tuple[Key, ...]
    """The skips that the partition stashes and pops. If there are any, values are ``Carried``."""
    links: dict[str, tuple[Link, Link]]
    """By kind of action, the links for inputs and results; in a step ``B`` only tells that it is
    done, since gradients wait in the ledger."""
    boundary: CallBoundary | StepBoundary
    weights_elsewhere: Weights
    """The parameters that layers compute with copies of; empty once these are made."""
    stats: PartitionStats | None
    """Where running statistics are noted, if they are deferred."""
    handlers: dict[str, Handler] = field(default_factory=dict)
    """How to carry out each kind of action."""
    outcome: Outcome = field(init=False)
    step_boundary: StepBoundary | None = field(init=False)
    """The boundary, if it cuts the graph."""
    loss: Callable[[int, Value], Value] | None = field(init=False)
    """Computes the loss, in the last stage of a step."""
    recomputed: int = field(init=False)
    """The number of micro-batches, from the first, that are checkpointed."""
    shared: list[Shared] = field(default_factory=list)
    """The tensors that share memory, in each skip and in the input of the current micro-batch."""
    _copies: ParameterCopies = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = self.run.outcome
        cut = self.boundary if isinstance(self.boundary, StepBoundary) else None
        self.step_boundary = cut
        self.loss = cut.compute_loss if cut and self.place.is_last else None
        has_grad = self.run.context.grad_enabled
        self.recomputed = self.run.plan.recomputed[self.place.j] if has_grad else 0
        self._copies = ParameterCopies()
        self._copies.note_versions(self.weights_elsewhere)

    def handler_for(self, kind: str, execute: Execute) -> Handler:
        """Return the handler of actions of ``kind``, which ``execute`` computes."""
        context = self.run.context
        receiving, sending = self.links.get(kind, (NOWHERE, NOWHERE))
        goes_back = kind in (BACKWARD, WEIGHT)
        around = context.going_back_on_worker if goes_back else context.on_worker
        return Handler(receiving.receive, around, execute, sending.send)

    def copy_weights(self, i: int) -> None:
        """Copy the parameters that live elsewhere, for the layers; once per run."""
        weights, self.weights_elsewhere = self.weights_elsewhere, ()
        for weight in weights:
            self._copies.copy_of(weight, self.place.j, partial(self.boundary.copy_weight, i))
        self.layers.copies = self._copies

    def enter(self, i: int, x: Value) -> Value:
        """Bring the input here, and the skips that are popped; find what shares memory.

        The input comes last, so that a backward goes on with its gradient first.
        """
        self.shared = []
        if not self.skips:
            return self._cross(i, x, self.boundary.copies.previous)
        arriving = [key for key in self.run.skips[i] if key in self.skips]
        skips = {key: self._bring(i, key) for key in arriving}
        return Carried(self._cross(i, x, self.boundary.copies.previous), skips)

    def _bring(self, i: int, key: Key) -> Value:
        stashed = self.run.skips[i].pop(key)
        return self._cross(i, stashed.get(key), stashed.origin, is_skip=True)

    def _cross(self, i: int, value: Value, origin: int | None, is_skip: bool = False) -> Value:
        self.shared.append(find_shared(value))
        return self.boundary.cross(i, value, origin, is_skip)

    def send_skips(self, i: int, y: Carried) -> Value:
        """Leave the skips beside an output to the stages that pop them; return the output."""
        for key, value in y.skips.items():
            self.run.skips[i][key] = Stashed(value, self.place.j)
        return y.value

    def give_up(self) -> None:
        """Close the links and drop all values but those of an executing action. From any thread.

        Wakes the worker if it waits for an input. What the executing action keeps is gone when the
        workers have taken the tasks of the run, which they leave out.
        """
        for link in chain.from_iterable(self.links.values()):
            link.close()
        self.boundary.drop()
        self.run.drop()


class Task:
    """One action of one run, as a worker takes it."""

    __slots__ = ("_action", "_due", "_handler", "_position", "_stage", "what")

    def __init__(self, stage: Stage, action: Action) -> None:
        self._stage = stage
        self._action = action
        self._position = stage.run.plan.positions[action]
        self._handler = stage.handlers[action.kind]
        self._due = Once((stage.outcome,))  # taken by whoever settles the action
        self.what = stage.run.number, action

    def receive(self) -> Any:
        """Return the action's input; ``NOT_RUN`` if the run failed earlier in the plan, or here."""
        if self._position >= self._stage.outcome.failed_at:
            return NOT_RUN
        try:
            received = self._handler.receive(self._action.i)
        except BaseException as error:  # noqa: B036  raised in the caller
            return self._fail(error)
        # Checked again, since it may have waited for long; a task left out here is not counted.
        return received if self._position < self._stage.outcome.failed_at else NOT_RUN

    def execute(self, received: Any) -> Any:
        stage, how = self._stage, self._handler
        try:
            with how.context:
                begin_microbatch(self._action.i)
                try:
                    variables = stage.run.context.variables.copy()
                    result = variables.run(how.execute, stage, self._action.i, received)
                except BaseException as error:  # noqa: B036  raised in the caller
                    result = self._fail(error)
                finally:
                    end_microbatch()
        except BaseException as error:  # noqa: B036
            # Parts of the context may still be in effect, so the worker must end (W4).
            self._fail(error)
            raise
        return result

    def send(self, result: Any) -> None:
        self._handler.send(self._action.i, result)
        self._due.pop().settle()

    def abandon(self, error: BaseException) -> None:
        for outcome in self._due.take() or ():  # nothing if the action was settled already
            outcome.fail(self._position, error)
            self._handler.send(self._action.i, NOT_RUN)
            outcome.settle()

    def _fail(self, error: BaseException) -> Any:
        self._stage.place.note(error, self._action)
        if self._stage.step_boundary is not None and "Specify retain_graph=True" in str(error):
            error.add_note(
                "perhaps a loss or a layer uses a tensor stored with its graph in another "
                "partition, micro-batch or call; return it from the layers up to loss_fn, detach "
                "it, or call the pipe and loss.backward()"
            )
        self._stage.outcome.fail(self._position, error)
        return NOT_RUN
