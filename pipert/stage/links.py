"""Carries values from stage to stage within one run.

A stage has a link for its inputs and one for its outputs, and in a step the same in the opposite
direction, which tell that ``B`` of the next stage is done. Skips go straight from the stashing
stage to the popping one.

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
from pipert.skip.namespace import Key
from pipert.skip.store import Stashed
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


class SkipLinks:
    """The skips of one run that are on their way.

    A stage sends its leaving skips before its output, so they have arrived when a later stage has
    received its input. Each is received once; what is left is dropped with the run. Thread-safe,
    since operations on a dict are atomic.
    """

    def __init__(self) -> None:
        # By skip, micro-batch and popping stage.
        self._values: dict[tuple[Key, int, int], Stashed] = {}

    def send(self, key: Key, i: int, k: int, value: Value) -> None:
        """Send a skip of micro-batch ``i`` to stage ``k``."""
        self._values[key, i, k] = Stashed(value)

    def receive(self, key: Key, i: int, k: int) -> Value:
        """Receive in stage ``k`` what was sent to it.

        Raises:
            RuntimeError: it was modified in place since.
        """
        return self._values.pop((key, i, k)).get(key)

    def clear(self) -> None:
        """Drop what nobody will receive."""
        self._values.clear()
