"""A turn at the interpreter for tasks that are shorter than a switch between threads.

The standard way is to let every worker with an input run. The interpreter lock lets one of them
execute Python at a time, and each torch operation gives it away for an instant. With eight workers
and tasks that cost 20 us, a prototype took 75 us a task, most of it spent in five context switches,
and 25 with turns. So workers whose layers compute next to nothing take
turns, and keep one for a few tasks. Real layers sleep or compute outside the interpreter lock, and
know nothing of turns: for them, one at a time would be slower.

A turn is a hint about speed, never about order:

* A worker waits for it for ``_PATIENCE`` at most, then goes on without, and does not ask for a
  while. Tasks that wait for each other, or a task that is suddenly long, delay nobody by more.
* It is given up before the worker blocks for anything else, and after ``_HOLD``.

How long layers took depends on who else wanted the interpreter. What counts is the shortest of the
last times, each forgotten by and by; one that is long beyond doubt counts at once.

A ``Turn`` belongs to one worker thread; the lock is shared by the workers of a pool.
"""

from __future__ import annotations

import threading
from time import perf_counter

__all__: list[str] = []


def _interpreter_speed() -> float:
    """Seconds for a thousand additions: 25 us on the machine on which the factors were found."""
    shortest = 1.0
    for _ in range(5):
        started = perf_counter()
        total = 0
        for k in range(1000):
            total += k
        shortest = min(shortest, perf_counter() - started)
    return shortest


_UNIT = _interpreter_speed()
_SHORT = 1.2 * _UNIT  # whose layers take less takes turns
_LONG = 20 * _UNIT  # layers that take more are long beyond doubt
_HOLD = 12 * _UNIT  # how long one may keep a turn when others wait
_PATIENCE = 80 * _UNIT  # how long one waits for a turn
_BACK_OFF = 2000 * _UNIT  # how long one who waited in vain does not ask again
_FORGET = 1.1  # by how much the shortest time grows at each task


class Turn:
    """One worker's part in the turns of its pool."""

    __slots__ = ("_ask_again", "_held_since", "_lock", "_took")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._held_since: float | None = None
        self._took = float("inf")  # of unknown layers expect that they are long
        self._ask_again = 0.0

    def take(self) -> None:
        """A task has all it needs and is about to start."""
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

    def layers_took(self, took: float) -> None:
        """The layers of the task computed for ``took`` seconds."""
        self._took = took if took > _LONG else min(took, self._took * _FORGET)
        if self._held_since is not None and self._took >= _SHORT:
            self.give_up()

    def give_up(self) -> None:
        """The worker is about to block, or to end."""
        if self._held_since is not None:
            self._held_since = None
            self._lock.release()

    def __repr__(self) -> str:
        return f"<Turn, {'held' if self._held_since is not None else 'not held'}>"
