"""Lets workers take turns at the interpreter, for tasks shorter than a thread switch.

The standard way is to let every worker with an input run. The interpreter lock lets one of them
execute Python at a time, and each torch operation releases it briefly. With eight workers and tasks
that cost 20 us, a prototype took 75 us per task, mostly in five context switches, and 25 with
turns. So workers whose layers compute next to nothing take turns, and keep one for a few tasks.
Real layers sleep or compute outside the interpreter lock and take no turns: running one at a time
would slow them down.

Layers of many small operations compute for milliseconds, mostly in the interpreter, and two of them
at a time take as long as one after the other, with more CPU time: any operation may switch threads.
A backward is different, since autograd walks the graph without the interpreter. So workers whose
layers take little time for each node of the graph take a turn for one ``F`` or ``R``, and none for
``B``, in runs where that has been found to be better (``engine.trials``). Layers that build no
graph are not measured.

A turn affects speed, never order:

* A worker waits for at most ``_PATIENCE``, or ``_BACK_OFF`` if its own layers are not short, then
  goes on without a turn and does not ask for a while. So tasks that wait for each other, or a
  suddenly long task, delay no worker by more.
* A worker gives it up before it blocks for anything else, and after ``_HOLD``.

Only with a turn can a worker measure its layers: without one they may wait for the interpreter ten
times as long as they compute. So a long time counts only if the worker had a turn, or if it is
longer than any wait for other workers is likely to be. Long layers are tried again after some
tasks. Otherwise short layers that once delayed each other would do so for ever, as each would look
long. Three short times in a row make layers short at once; one among long ones does not. The time
of an operation follows the same idea: what looks long without a turn is tried again.

A ``Turn`` belongs to one worker thread; the lock is shared by the workers of a pool. Where threads
execute Python in parallel, nobody takes a turn.
"""

from __future__ import annotations

import timeit
from time import perf_counter
from typing import Protocol

from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME

__all__: list[str] = []


# Seconds for a thousand additions: 25 us on the machine used to tune the factors.
_UNIT = min(timeit.repeat("for k in range(1000): total += k", "total = 0", number=1))
_SHORT = 2.5 * _UNIT  # workers whose layers take less take turns
_LONG = 50 * _UNIT  # layers that take more are clearly long
_HOLD = 12 * _UNIT  # how long a worker may keep a turn while others wait
_PATIENCE = 400 * _UNIT  # how long a worker waits for a turn; the holder may take it again
_BACK_OFF = 4000 * _UNIT  # how long a worker does not ask again after waiting in vain
_DOUBLE = 2.0  # the most by which the time of an operation may grow with a task that had a turn
_GROW = 1.1  # the most by which the time may grow with each task that had a turn
_SHRINK = 0.95  # the factor for each task without a turn: sixty tasks from long to short
_SHORT_COUNTS = 4  # the most by which a short task without a turn may divide the time
_SMALL = 4 * _UNIT  # operations that take less may be small; a trial decides
_MANY = 32  # nodes; for fewer, a turn for each task costs more than it saves
_SPARE = 8  # after a long task with a turn, a worker asks for none for this many times as long


class Lock(Protocol):
    """The lock that the workers of a pool share: an ``RLock``, which knows its holder."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait for the lock; return whether it was acquired."""

    def release(self) -> None:
        """Release the lock; ``RuntimeError`` if another thread holds it, or none."""


class Turn:
    """One worker's side of the turns in its pool."""

    __slots__ = ("_ask_again", "_held_since", "_lock", "_operation", "_took")

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._held_since: float | None = None
        self._took = float("inf")  # assume that unknown layers are long
        self._operation = float("inf")  # and their operations
        self._ask_again = 0.0

    def take(self, may_be_long: bool = False) -> None:
        """Take a turn if layers are short; call when a task has its inputs and starts.

        With ``may_be_long`` also if layers are long, but consist of small operations.
        """
        now = perf_counter()
        if self._held_since is not None and now - self._held_since > _HOLD:
            self.give_up()
        is_short = self._took < _SHORT
        wants = is_short or (may_be_long and self._operation < _SMALL)
        may = ONE_THREAD_AT_A_TIME and now >= self._ask_again
        if self._held_since is None and wants and may:
            taken = self._lock.acquire(timeout=_PATIENCE if is_short else _BACK_OFF)
            now = perf_counter()
            if taken:
                self._held_since = now
            else:
                self._ask_again = now + _BACK_OFF

    def executed(self, task: float, layers: float | None, nodes: int = 0) -> None:
        """Note how long a task took, its layers if it has called any, and how many nodes these
        created.
        """
        if layers is not None and nodes >= _MANY:
            most = _DOUBLE if self._held_since is not None else _SHRINK
            self._operation = min(layers / nodes, most * self._operation)
        if layers is None:
            pass  # a backward, say
        elif layers > _LONG:
            self._took = layers
        elif self._held_since is not None:
            self._took = min(layers, _GROW * self._took)
        elif layers < _SHORT:
            self._took = max(layers, min(_LONG, self._took) / _SHORT_COUNTS)
        elif self._took >= _SHORT:  # shorter ones wait in vain for a turn, which would show it
            self._took = min(_LONG, _SHRINK * self._took)
        if self._held_since is None:
            return
        if self._took >= _SHORT:
            self._took = max(self._took, _LONG)
            self.give_up()
        elif task > _LONG:  # a backward or a loss may be long, too
            self._ask_again = perf_counter() + _SPARE * task
            self.give_up()

    def give_up(self) -> None:
        """Give up the turn; call when the worker is about to block."""
        if self._held_since is not None:
            self._held_since = None
            self._lock.release()

    def end(self) -> None:
        """Give up the turn; call when the worker ends.

        An exception thrown into the worker may have come between taking a turn and noting it.
        """
        self._held_since = None
        try:
            self._lock.release()
        except RuntimeError:  # the worker has no turn
            pass

    def __repr__(self) -> str:
        return f"<Turn, {'held' if self._held_since is not None else 'not held'}>"
