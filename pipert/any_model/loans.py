"""Loans: a worker lends its turn to a driver and waits; the driver computes and returns it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from queue import Empty, SimpleQueue

from pipert._typing import Value
from pipert.errors import WorkerDiedError
from pipert.stage.stage import Stage

__all__: list[str] = []

POLL = 0.5  # s; how often a thread that waits for a driver checks that it is alive


class _Sent(enum.Enum):
    SENT = "sent"


SENT = _Sent.SENT
"""Returned with a turn in place of a value, when the driver itself has told the next stage."""

_Answer = tuple[Value, BaseException | None]
_Returned = SimpleQueue[_Answer]


class Loans:
    """The loans of one micro-batch's turns.

    A driver may return one turn and be lent the next before the worker of the first has noticed,
    so each partition has a queue of its own for returned turns.

    Args:
        n: the number of partitions.
    """

    def __init__(self, n: int) -> None:
        self._lent: SimpleQueue[Stage | None] = SimpleQueue()
        self._returned = [_Returned() for _ in range(n)]

    # On a worker.

    def lend(self, stage: Stage, is_lost: Callable[[], bool]) -> Value:
        """Lend the turn of ``stage``, and wait until it is returned.

        Args:
            stage: the stage whose turn it is.
            is_lost: tells whether the turn can no longer be returned.

        Returns:
            The value that the turn is returned with. An error that it is returned with is raised.
        """
        self._lent.put(stage)
        value, error = self._wait(self._returned[stage.place.j], is_lost)
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait(self, returned: _Returned, is_lost: Callable[[], bool]) -> _Answer:
        while True:
            try:
                return returned.get(timeout=POLL)
            except Empty:
                pass
            if is_lost() and returned.empty():
                raise WorkerDiedError("a driver thread was ended from outside during the call")

    # On any thread.

    def end(self) -> None:
        """Tell the driver that no further turn will be lent."""
        self._lent.put(None)

    def fail(self, j: int, error: BaseException) -> None:
        """Return the turn of partition ``j`` with an error, which is kept if no worker waits."""
        self._returned[j].put(((), error))

    def drop(self) -> None:
        """Discard what was returned and never received."""
        for returned in self._returned:
            while not returned.empty():
                returned.get()

    # On a driver.

    def give_back(self, j: int, value: Value) -> None:
        """Return the turn of partition ``j`` with ``value``."""
        self._returned[j].put((value, None))

    def take(self) -> Stage | None:
        """Wait for the next turn, and return its stage; ``None`` if there will be none."""
        return self._lent.get()

    def __repr__(self) -> str:
        return f"<Loans, {self._lent.qsize()} not taken>"
