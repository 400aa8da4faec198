"""Shows other threads what a worker is doing and has done.

Only the worker's thread writes this state, a tuple that is replaced in one step. So a reader on any
thread sees figures of one moment, without a lock. It holds words and numbers: an idle worker
references nothing of its last task (**W2**).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

__all__: list[str] = []


class State(NamedTuple):
    """The state of a worker at one moment."""

    tasks: int
    """The number of completed tasks, failed ones included."""
    busy: float
    """Seconds spent on them."""
    what: Any = None
    """The ``what`` of the current task; ``None`` when the worker is idle."""
    since: float = 0.0
    """When it began to wait for the input, or to execute the task, in ``perf_counter`` seconds."""
    works: bool = False
    """Whether it executes the task, rather than waiting for its input."""


_state = partial(tuple.__new__, State)  # without a Python call


class Activity:
    """The activity of one worker. It is kept when the worker's thread is replaced."""

    __slots__ = ("_seen", "state")

    def __init__(self) -> None:
        self.state = State(0, 0.0)
        self._seen = deque([0.0], maxlen=64)

    def busy_by(self, state: State, now: float) -> float:
        """Return the seconds spent on tasks by ``now``, the current task included. Never decreases.

        The worker may have read the clock at the end of its task without having written it yet. And
        other readers, or a signal handler, may run between any two lines of this: each appends what
        it returns, and enough of these are kept for all that can run at a time.
        """
        busy = state.busy + (max(0.0, now - state.since) if state.works else 0.0)
        busy = max(busy, *tuple(self._seen))
        self._seen.append(busy)
        return busy

    def waits(self, what: Any) -> None:
        """Note that the worker waits for the input of a task. ``what`` must hold no tensors."""
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
