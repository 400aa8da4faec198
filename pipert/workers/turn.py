"""A turn at the interpreter for tasks that are shorter than a switch between threads.

The standard way is to let every worker with an input run. The interpreter lock lets one of them
execute Python at a time, and each torch operation gives it away for an instant: with eight workers
and tasks of 20 us, most of the time went into five context switches for each task (77 us a task; 25
us with turns; ``benchmarks/overhead.py``). So workers whose tasks are short take turns, and keep
one for a few tasks. Tasks that are long, such as real layers, sleep or compute outside the
interpreter lock, know nothing of turns.

A turn is a hint about speed, never about order:

* A worker waits for it for ``_PATIENCE`` at most, then goes on without, and does not ask for a
  while. Tasks that wait for each other, or a task that is suddenly long, therefore delay nobody by
  more.
* It is given up before the worker blocks for anything else, and after ``_HOLD``.

A ``Turn`` belongs to one worker thread; the lock is shared by the workers of a pool.
"""

from __future__ import annotations

import threading
from time import perf_counter

__all__: list[str] = []

_SHORT = 200e-6  # s; tasks below take turns
_HOLD = 300e-6  # s; how long one may keep a turn when others wait
_PATIENCE = 2e-3  # s; how long one waits for a turn
_BACK_OFF = 50e-3  # s; how long one who waited in vain does not ask again


class Turn:
    """One worker's part in the turns of its pool."""

    __slots__ = ("_ask_again", "_held_since", "_lock", "_started", "_took")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._held_since: float | None = None
        self._started = 0.0
        self._took = float("inf")  # of an unknown task expect that it is long
        self._ask_again = 0.0

    def begin(self) -> None:
        """A task is about to compute."""
        now = perf_counter()
        if self._held_since is not None and now - self._held_since > _HOLD:
            self.give_up()
        if self._held_since is None and self._took < _SHORT and now >= self._ask_again:
            taken = self._lock.acquire(timeout=_PATIENCE)
            now = perf_counter()
            if taken:
                self._held_since = now
            else:
                self._ask_again = now + _BACK_OFF
        self._started = now

    def end(self) -> None:
        """The task has computed."""
        self._took = perf_counter() - self._started
        if self._took >= _SHORT:
            self.give_up()

    def give_up(self) -> None:
        """The worker is about to block, or to end."""
        if self._held_since is not None:
            self._held_since = None
            self._lock.release()

    def __repr__(self) -> str:
        return f"<Turn, {'held' if self._held_since is not None else 'not held'}>"
