"""A worker hands off its partition to a micro-batch thread, and waits until it is handed back."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from pipert._typing import Value
from pipert.errors import WorkerDiedError
from pipert.stage.stage import Stage

POLL = 0.5  # s; how often a thread that waits for another checks that it is alive


_Answer = tuple[Value, BaseException | None]
_HandedBack = SimpleQueue[_Answer]


class HandOff:
    """The hand-offs of one micro-batch.

    The thread may hand back one partition and be handed the next before the first worker has
    noticed, so the way back has a queue for each partition.

    Args:
        n: the number of partitions.
    """

    def __init__(self, n: int) -> None:
        self._handed_off: SimpleQueue[Stage | None] = SimpleQueue()
        self._handed_back = [_HandedBack() for _ in range(n)]

    # On a worker.

    def hand_off(self, stage: Stage, is_lost: Callable[[], bool]) -> Value:
        """Hand off the partition of ``stage``, and wait until it is handed back.

        Args:
            stage: the stage of the partition.
            is_lost: tells whether it can no longer be handed back.

        Returns:
            The value that it is handed back with. An error that it is handed back with is raised.
        """
        self._handed_off.put(stage)
        value, error = self._wait(self._handed_back[stage.place.j], is_lost)
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # it references this frame

    def _wait(self, handed_back: _HandedBack, is_lost: Callable[[], bool]) -> _Answer:
        while True:
            try:
                return handed_back.get(timeout=POLL)
            except Empty:
                pass
            if is_lost() and handed_back.empty():
                raise WorkerDiedError(
                    "the thread of a micro-batch was ended from outside during the call"
                )

    # On any thread.

    def end(self) -> None:
        """Tell the thread that no further partition will be handed off."""
        self._handed_off.put(None)

    def fail(self, j: int, error: BaseException) -> None:
        """Hand back partition ``j`` with an error, which is kept if no worker waits."""
        self._handed_back[j].put(((), error))

    def drop(self) -> None:
        """Discard what was handed back and never received."""
        for handed_back in self._handed_back:
            while not handed_back.empty():
                handed_back.get()

    # On the micro-batch thread.

    def hand_back(self, j: int, value: Value) -> None:
        """Hand back partition ``j`` with ``value``."""
        self._handed_back[j].put((value, None))

    def take(self) -> Stage | None:
        """Wait for the next partition, and return its stage; ``None`` if there will be none."""
        return self._handed_off.get()
