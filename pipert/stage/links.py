"""Links: what carries values from stage to stage within one run.

A stage has one for its inputs and one for its outputs, and in a step the same for gradients. Skips
have a link of their own, straight from the stage that stashes to the one that pops.

A link ends with its run. It never tells micro-batches apart: all stages have one order of them
(rule 4 of ``schedules.plan``), so a FIFO is enough. Only the caller, who has all inputs at once,
gives each by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from pipert._typing import Value
from pipert.queues.closable import ClosableQueue, QueueClosed
from pipert.skip.namespace import Key
from pipert.skip.store import Stashed
from pipert.workers.worker import NOT_RUN

__all__: list[str] = []


class Link(Protocol):
    """Carries one value for each micro-batch."""

    def send(self, i: int, value: Value) -> None:
        """Carry the value of micro-batch ``i``, or ``NOT_RUN``. Never blocks."""

    def receive(self, i: int, before_waiting: Callable[[], None]) -> Value:
        """Wait for the value of micro-batch ``i``; ``NOT_RUN`` if there will be none."""

    def close(self) -> None:
        """Wake whoever waits, and drop what is on its way. Any thread."""


class Between:
    """From one stage to the next: a queue."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: ClosableQueue[Value] = ClosableQueue()

    def send(self, i: int, value: Value) -> None:
        try:
            self._queue.put(value)
        except QueueClosed:
            pass  # the run was given up

    def receive(self, i: int, before_waiting: Callable[[], None]) -> Value:
        try:
            return self._queue.get(before_waiting)
        except QueueClosed:
            return NOT_RUN

    def close(self) -> None:
        self._queue.close()


class FromCaller:
    """From the caller to the first stage; empties the list of inputs as the run goes on."""

    __slots__ = ("_inputs",)

    def __init__(self, inputs: list[Value]) -> None:
        self._inputs = inputs

    def send(self, i: int, value: Value) -> None:
        raise AssertionError("the caller has sent all inputs when the run begins")

    def receive(self, i: int, before_waiting: Callable[[], None]) -> Value:
        value, self._inputs[i] = self._inputs[i], None
        return value

    def close(self) -> None:
        self._inputs[:] = [NOT_RUN] * len(self._inputs)


class ToCaller:
    """From the last stage to the caller, who takes the list when the run is over."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: list[Value]) -> None:
        self._outputs = outputs

    def send(self, i: int, value: Value) -> None:
        self._outputs.append(value)

    def receive(self, i: int, before_waiting: Callable[[], None]) -> Value:
        raise AssertionError("the caller takes all outputs when the run is over")

    def close(self) -> None:
        self._outputs.clear()


class Nowhere:
    """Where there is nothing to carry: discards what is sent, and delivers an empty tuple."""

    __slots__ = ()

    def send(self, i: int, value: Value) -> None:
        """Discard it."""

    def receive(self, i: int, before_waiting: Callable[[], None]) -> Value:
        """Return at once."""
        return ()

    def close(self) -> None:
        """Nobody waits."""


NOWHERE = Nowhere()


class SkipLinks:
    """The links of skips in one run, and their gradients' way back.

    A stage sends the skips that leave it before its output, so they are there when a later stage
    has received its input; and gradients likewise. Each is received once; the rest goes with the
    run. Operations on a dict are atomic.
    """

    __slots__ = ("_back", "_there")

    def __init__(self) -> None:
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
