"""What a worker is doing and has done, as other threads may see it.

The worker's thread alone writes it. All of it is one tuple that is replaced in one step, so whoever
reads it, on any thread and without a lock, sees figures that were true together.

It holds words and numbers: an idle worker references nothing of its last task (**W2**).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

__all__: list[str] = []


class State(NamedTuple):
    """One moment of a worker."""

    tasks: int
    """That it has completed, failed ones included."""
    busy: float
    """Seconds it has spent on them."""
    what: Any = None
    """The ``what`` of the task it is at; ``None`` when it is idle."""
    since: float = 0.0
    """When it began that, in ``perf_counter`` seconds."""
    works: bool = False
    """Whether it executes that, rather than waiting for it."""


_state = partial(tuple.__new__, State)  # without a Python call


class Activity:
    """One worker's; stays when its thread is replaced."""

    __slots__ = ("_seen", "state")

    def __init__(self) -> None:
        self.state = State(0, 0.0)
        self._seen = deque([0.0], maxlen=64)

    def busy_by(self, state: State, now: float) -> float:
        """Seconds spent on tasks by ``now``, the present one included; never less than before.

        The worker may have read the clock for the end of its task, and not have written it yet.
        And other readers, or a signal handler, may come by at any line of this: what they have
        seen is appended, and stays for as many as can be at work here.
        """
        busy = state.busy + (max(0.0, now - state.since) if state.works else 0.0)
        busy = max(busy, *tuple(self._seen))
        self._seen.append(busy)
        return busy

    def waits(self, what: Any) -> None:
        """Note that a task was taken and lacks its input. ``what`` holds no tensors."""
        tasks, busy, *_ = self.state
        self.state = _state((tasks, busy, what, perf_counter(), False))

    def works(self) -> None:
        """Note that the task begins."""
        tasks, busy, what, *_ = self.state
        self.state = _state((tasks, busy, what, perf_counter(), True))

    def rests(self) -> None:
        """Note that the task is over."""
        tasks, busy, _, since, works = self.state
        if works:
            tasks, busy = tasks + 1, busy + perf_counter() - since
        self.state = _state((tasks, busy, None, 0.0, False))

    def __repr__(self) -> str:
        return f"<Activity: {self.state.what or 'idle'}, {self.state.tasks} tasks>"
