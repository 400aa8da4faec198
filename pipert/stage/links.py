"""Carries values from stage to stage within one run.

A stage has a link for its inputs and one for its outputs, and in a step the same in the opposite
direction, which tell that ``B`` of the next stage is done.

A link ends with its run. It never tells micro-batches apart: all stages have them in the same order
(rule 4 of ``schedules.plan``), so a FIFO is enough. Only the inputs from the caller, who has them
all at once, are received by number.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from pipert._typing import Value
from pipert.queues.closable import ClosableQueue
from pipert.workers.worker import NOT_RUN


class _Sent(enum.Enum):
    SENT = "sent"


SENT = _Sent.SENT
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

    def close() -> None:
        inputs[:] = [NOT_RUN] * len(inputs)

    return Link(NOWHERE.send, receive, close)


def to_caller(outputs: list[Value]) -> Link:
    """Return a link from the last stage to ``outputs``, which the caller reads after the run."""
    return Link(lambda i, value: outputs.append(value), NOWHERE.receive, outputs.clear)
