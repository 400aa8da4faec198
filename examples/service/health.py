"""Whether training goes on, as seen from another thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipert import Pipe

__all__ = ["Health"]


class Health:
    """Healthy is who has finished a step lately, and no worker of whom is stuck.

    Args:
        pipe: whose workers to look at.
        limit: seconds. No step may take longer, saving included, and no task of a worker.
        clock: in seconds.
    """

    def __init__(
        self, pipe: Pipe, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipe, self._limit, self._clock = pipe, limit, clock
        self._last = clock()

    def step_finished(self) -> None:
        """Training goes on."""
        self._last = self._clock()

    def problems(self) -> list[str]:
        """Why it is not healthy, in words; nothing if it is. Any thread."""
        found = []
        since = self._clock() - self._last
        if since > self._limit:
            found.append(f"no step was finished for {since:.1f} s")
        for worker in self._pipe.statistics().workers:
            task = worker.doing
            if task is not None and task.phase == "forward" and task.seconds > self._limit:
                found.append(
                    f"{worker.name} has been at partition {task.partition}, micro-batch "
                    f"{task.micro_batch} for {task.seconds:.1f} s"
                )
        return found
