"""Links: what carries values from stage to stage within one run.

A stage has one for its inputs and one for its outputs, and in a step the same for gradients. Skips
have a link of their own, straight from the stage that stashes to the one that pops.

A link ends with its run. It never tells micro-batches apart: all stages have one order of them
(rule 4 of ``schedules.plan``), so a FIFO is enough. Only the caller, who has all inputs at once,
gives each by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from pipert._typing import Value
from pipert.queues.closable import ClosableQueue, QueueClosed
from pipert.skip.namespace import Key
from pipert.skip.store import Stashed
from pipert.workers.worker import NOT_RUN

__all__: list[str] = []


class Link(NamedTuple):
    """Carries one value for each micro-batch."""

    send: Callable[[int, Value], None]
    """Carries the value of a micro-batch, or ``NOT_RUN``. Never blocks."""
    receive: Callable[[int, Callable[[], None]], Value]
    """Waits for the value of a micro-batch, and calls its other argument before it blocks; returns
    ``NOT_RUN`` if there will be none."""
    close: Callable[[], object]
    """Wakes whoever waits, and drops what is on its way. Any thread."""


NOWHERE = Link(lambda i, value: None, lambda i, before_waiting: (), lambda: None)
"""Where there is nothing to carry: discards what is sent, and delivers an empty tuple."""


def between() -> Link:
    """From one stage to the next: a queue."""
    queue: ClosableQueue[Value] = ClosableQueue()

    def send(i: int, value: Value) -> None:
        try:
            queue.put(value)
        except QueueClosed:
            pass  # the run was given up

    def receive(i: int, before_waiting: Callable[[], None]) -> Value:
        try:
            return queue.get(before_waiting)
        except QueueClosed:
            return NOT_RUN

    return Link(send, receive, queue.close)


def from_caller(inputs: list[Value]) -> Link:
    """To the first stage; empties ``inputs`` as the run goes on."""

    def receive(i: int, before_waiting: Callable[[], None]) -> Value:
        value, inputs[i] = inputs[i], None
        return value

    def close() -> None:
        inputs[:] = [NOT_RUN] * len(inputs)

    return Link(NOWHERE.send, receive, close)


def to_caller(outputs: list[Value]) -> Link:
    """From the last stage; the caller takes the list when the run is over."""
    return Link(lambda i, value: outputs.append(value), NOWHERE.receive, outputs.clear)


class SkipLinks:
    """The links of skips in one run, and their gradients' way back.

    A stage sends the skips that leave it before its output, so they are there when a later stage
    has received its input; and gradients likewise. Each is received once; the rest goes with the
    run. Operations on a dict are atomic.
    """

    def __init__(self) -> None:
        # By skip, micro-batch and the stage that pops it.
        self._there: dict[tuple[Key, int, int], Stashed] = {}
        self._back: dict[tuple[Key, int, int], Sequence[Tensor | None]] = {}

    def send(self, key: Key, i: int, k: int, value: Value) -> None:
        """Send a skip of micro-batch ``i`` to stage ``k``."""
        self._there[key, i, k] = Stashed(value)

    def receive(self, key: Key, i: int, k: int) -> Value:
        """Receive in stage ``k`` what was sent.

        Raises:
            RuntimeError: it was modified in place since.
        """
        return self._there.pop((key, i, k)).get(key)

    def send_back(self, key: Key, i: int, k: int, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of what stage ``k`` has received."""
        self._back[key, i, k] = gradients

    def receive_back(self, key: Key, i: int, k: int) -> Sequence[Tensor | None] | None:
        """Receive the gradients of what was sent to stage ``k``; ``None`` if it has none."""
        return self._back.pop((key, i, k), None)

    def clear(self) -> None:
        """Drop what nobody will receive."""
        self._there.clear()
        self._back.clear()

    def __repr__(self) -> str:
        return f"<SkipLinks, {len(self._there)} there and {len(self._back)} back>"
