"""Judges from another thread whether training makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from ranks import AnyPipe

__all__ = ["Health"]


class Health:
    """A judge of the training: healthy if a step finished recently and no worker is stuck.

    Args:
        pipe: the pipe whose workers to inspect. A pipe over several processes has no workers.
        limit: the longest healthy time in seconds of a step, including saving, or a worker's task.
        clock: returns the time in seconds.
    """

    def __init__(
        self, pipe: AnyPipe, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipe, self._limit, self._clock = pipe, limit, clock
        self._last = clock()

    def step_finished(self) -> None:
        """Records that a step has finished."""
        self._last = self._clock()

    def problems(self) -> list[str]:
        """Describes what is wrong; empty if healthy. Thread-safe."""
        found = []
        since = self._clock() - self._last
        if since > self._limit:
            found.append(f"no step was finished for {since:.1f} s")
        for worker in self._pipe.statistics().workers:
            task = worker.doing
            if task is None or task.phase == "waiting for input":
                continue
            if task.seconds > self._limit:
                found.append(
                    f"{worker.name} has been at partition {task.partition}, micro-batch "
                    f"{task.micro_batch} for {task.seconds:.1f} s"
                )
        return found
