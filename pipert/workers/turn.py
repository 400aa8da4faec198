"""Turns at the interpreter, for workers that would fight for it.

The standard way is to let every worker with an input run. The interpreter lock lets one of them
execute Python at a time, and each torch operation releases it briefly. Two kinds of tasks are
better off in turns:

* Tasks shorter than a thread switch. With eight workers and tasks that cost 20 us, a prototype took
  75 us per task, mostly in five context switches, and 25 with turns. They keep one for a few tasks.
* Tasks of many small operations, which cost more Python than computation. Two workers that run
  layers at the same time wait for each other at every few operations, and each takes twice as long
  or more. They are known by their waits, which the operating system counts: 5 to 11 a millisecond,
  and less than one if the layers compute. A turn is kept for one task. Layers may also wait for
  something else, such as a device: then tasks are no shorter with a turn, and take none for long.
  Since nobody fights who has a turn, a task now and then goes without, to see whether turns are
  still needed. What goes backward executes hardly any Python, and takes none.

Real layers sleep or compute outside the interpreter lock and take no turns: running one at a time
would slow them down.

A turn affects speed, never order:

* A worker waits for a limited time, then goes on without a turn and does not ask for a while. So
  tasks that wait for each other, or a suddenly long task, delay no worker by more.
* A worker gives it up before it blocks for anything else, and after ``_HOLD``.

The time that layers take depends on the demand for the interpreter. So the shortest recent time
counts, and older times decay; a time that is clearly long counts at once.

A ``Turn`` belongs to one worker thread, ``Turns`` to the workers of a pool. Where threads execute
Python at the same time, nobody takes one.
"""

from __future__ import annotations

import sys
import threading
import timeit
from time import perf_counter

from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME

if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage

    def waits() -> int:
        """How often the current thread has waited so far, for the interpreter or anything else."""
        return getrusage(RUSAGE_THREAD).ru_nvcsw

else:

    def waits() -> int:
        """Nobody counts that here."""
        return 0


__all__: list[str] = []


# Seconds for a thousand additions: 25 us on the machine used to tune the factors.
_UNIT = min(timeit.repeat("for k in range(1000): total += k", "total = 0", number=1))
_SHORT = 1.2 * _UNIT  # workers whose layers take less take turns
_LONG = 20 * _UNIT  # layers that take more are clearly long
_HOLD = 12 * _UNIT  # how long a worker may keep a turn while others wait
_PATIENCE = 80 * _UNIT  # how long a worker waits for a turn
_BACK_OFF = 25  # so many times as long it does not ask again after waiting in vain
_FORGET = 1.1  # the factor by which the shortest time grows with each task
_FIGHT = 2000.0  # who waits more often in a second of a task fights for the interpreter
_PATIENCE_IN_TASKS = 8  # how long one waits for a turn who does, in tasks of its own
# One task of so many is looked at; of those that take turns. Primes, so it is not always the same.
_LOOK, _LOOK_AGAIN = 7, 61
_WORTH = 0.9  # a turn has helped if the task took less than that of its time without
_IN_VAIN, _LOOK_LATER = 4, 251  # who had so many in vain is looked at so many tasks later


class Turns:
    """What the workers of a pool take turns by."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._first_in_line = threading.Lock()  # held by who gets the turn next

    def acquire_in_line(self, timeout: float) -> bool:
        """Acquire the lock; who has just released it comes after those who wait."""
        end = perf_counter() + timeout
        if not self._first_in_line.acquire(timeout=timeout):
            return False
        try:
            return self.lock.acquire(timeout=max(0.0, end - perf_counter()))
        finally:
            self._first_in_line.release()


class Turn:
    """One worker's side of the turns in its pool."""

    __slots__ = (
        "_ask_again", "_fights", "_held_since", "_in_vain", "_took", "_turns", "_until_look",
        "_waits", "_without",
    )  # fmt: skip

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._held_since: float | None = None
        self._took = float("inf")  # assume that unknown layers are long
        self._ask_again = 0.0
        self._fights = False
        self._until_look = _LOOK  # tasks that call layers
        self._waits: int | None = None  # before the task at hand, if it is looked at
        self._without = 0.0  # s; what the last one that was looked at took, without a turn
        self._in_vain = 0  # how many with a turn, in a row, were no shorter

    def take(self, calls_layers: bool) -> None:
        """Take a turn if one is worth it; call when a task has its inputs and starts.

        Args:
            calls_layers: whether the task calls layers of the user's.
        """
        now = perf_counter()
        self._waits = None
        if self._held_since is not None and now - self._held_since > _HOLD:
            self.give_up()
        if self._held_since is not None or now < self._ask_again or not ONE_THREAD_AT_A_TIME:
            return
        if self._took < _SHORT:
            patience = _PATIENCE
            taken = self._turns.lock.acquire(timeout=patience)
        elif calls_layers:
            self._until_look -= 1
            if self._until_look <= 0:
                self._waits = waits()
                return
            if not self._fights:
                return
            patience = _PATIENCE_IN_TASKS * self._took
            taken = self._turns.acquire_in_line(patience)
        else:
            return
        now = perf_counter()
        if taken:
            self._held_since = now
        else:
            self._ask_again = now + _BACK_OFF * patience

    def layers_took(self, took: float) -> None:
        """Note that the task's layers computed for ``took`` seconds."""
        if self._waits is not None:
            self._fights = waits() - self._waits > _FIGHT * took
            self._without, self._waits, self._in_vain = took, None, 0
            self._until_look = _LOOK_AGAIN if self._fights else _LOOK
        elif self._fights and self._held_since is not None:
            self._in_vain = self._in_vain + 1 if took > _WORTH * self._without else 0
            if self._in_vain == _IN_VAIN:
                self._fights, self._until_look = False, _LOOK_LATER
        self._took = took if took > _LONG else min(took, self._took * _FORGET)
        if self._held_since is not None and self._took >= _SHORT:
            self.give_up()

    def give_up(self) -> None:
        """Give up the turn; call when the worker is about to block or end."""
        if self._held_since is not None:
            self._held_since = None
            self._turns.lock.release()

    def __repr__(self) -> str:
        return f"<Turn, {'held' if self._held_since is not None else 'not held'}>"
