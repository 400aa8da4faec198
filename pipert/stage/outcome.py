"""Tracks the outcome of a run: which actions may start, what has failed, whether all is settled.

Guarantees:

* **R2** ``wait`` returns when each action of the run has run, failed or been left out.
* **R3** of several failures the one that comes first in the plan is raised, whatever the timing.
* **R4** after a failure nothing later in the plan starts. What comes earlier still does: it might
  fail too, and then it is the failure to raise. So the actions before the first failing one always
  run, which makes R3 hold for every timing.

``failed_at`` only decreases, under the lock; workers read it without the lock.
"""

from __future__ import annotations

import threading

from pipert.queues.latch import Latch
from pipert.schedules.plan import Plan

_NEVER = 1 << 62
_CANCELLED = -1


class Outcome:
    """The outcome of one run. Thread-safe.

    References neither stages nor values, so that whoever watches the run may keep it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failed_at = _NEVER
        self._lock = threading.RLock()  # a signal handler may close the pipe inside cancel
        self._errors: dict[int, BaseException] = {}
        self._latch = Latch(len(plan))
        self.settle = self._latch.arrive  # call it once per action

    def fail(self, position: int, error: BaseException) -> None:
        """Note that the action at ``position`` of the plan failed."""
        with self._lock:
            if self.failed_at != _CANCELLED:
                self._errors.setdefault(position, error)
                self.failed_at = min(self.failed_at, position)

    def cancel(self) -> None:
        """Let no further action start, and forget all failures, later ones included."""
        with self._lock:
            self.failed_at = _CANCELLED
            self._errors = {}

    def has_failed(self) -> bool:
        """Return whether an action has failed, or the run was cancelled."""
        return self.failed_at != _NEVER

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until all is settled; return whether it is."""
        return self._latch.wait(timeout)

    def is_settled(self) -> bool:
        """Return whether no action of the run is queued or executing."""
        return self._latch.is_open()

    def take_error(self) -> BaseException | None:
        """Return the failure to raise, if any; forget all, so that no cycle keeps their frames."""
        with self._lock:
            errors, self._errors = self._errors, {}
        return errors[min(errors)] if errors else None

    def first_error(self) -> BaseException | None:
        """Return the failure to raise, if any."""
        with self._lock:
            return self._errors[min(self._errors)] if self._errors else None
