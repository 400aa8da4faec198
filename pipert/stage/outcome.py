"""How far a run is: which tasks may start, what has failed, and whether all is settled.

Guarantees:

* **R2** ``wait`` returns when each task of the run has run, failed or been left out.
* **R3** of several failures the one that comes first in the schedule is raised, whatever the
  timing.
* **R4** after a failure nothing later in the schedule starts. What comes earlier still does: it
  might fail too, and then it is the one to be raised. That is what makes R3 hold for every timing:
  the tasks before the first failing one always run.

``failed_at`` only falls, under the lock; tasks read it without.
"""

from __future__ import annotations

import enum
import threading

from pipert.queues.latch import Latch
from pipert.schedules.clock_cycle import Schedule
from pipert.schedules.plan import StepSchedule

__all__: list[str] = []


class _NotRun(enum.Enum):
    NOT_RUN = "not run"


NOT_RUN = _NotRun.NOT_RUN
"""Sent instead of an output when there is none."""

_NEVER = 1 << 62
_CANCELLED = -1


class Progress:
    """The state that the tasks of one run share."""

    __slots__ = ("_errors", "_latch", "_lock", "failed_at", "schedule", "settle")

    def __init__(self, schedule: Schedule | StepSchedule) -> None:
        self.schedule = schedule
        self.failed_at = _NEVER
        self._lock = threading.RLock()  # a signal handler may close the pipe inside of cancel
        self._errors: dict[int, BaseException] = {}
        self._latch = Latch(len(schedule))
        self.settle = self._latch.arrive  # once for each task

    def fail(self, position: int, error: BaseException) -> None:
        """The task at ``position`` failed."""
        with self._lock:
            if self.failed_at != _CANCELLED:
                self._errors.setdefault(position, error)
                self.failed_at = min(self.failed_at, position)

    def cancel(self) -> None:
        """Let no further task start, and forget what has failed and will fail."""
        with self._lock:
            self.failed_at = _CANCELLED
            self._errors = {}

    def has_failed(self) -> bool:
        """Whether a task has failed, or the run was cancelled."""
        return self.failed_at != _NEVER

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all tasks are settled; for ``timeout`` seconds at most. Whether they are."""
        return self._latch.wait(timeout)

    def is_settled(self) -> bool:
        """Whether nothing of the run is queued or executing."""
        return self._latch.is_open()

    def take_error(self) -> BaseException | None:
        """The failure to raise, if any; forget all, so that no cycle keeps their frames alive."""
        with self._lock:
            errors, self._errors = self._errors, {}
        return errors[min(errors)] if errors else None

    def __repr__(self) -> str:
        state = "settled" if self._latch.is_open() else "running"
        failed = "" if self.failed_at == _NEVER else f", failed at {self.failed_at}"
        return f"<Progress of m={self.schedule.m} n={self.schedule.n}, {state}{failed}>"
