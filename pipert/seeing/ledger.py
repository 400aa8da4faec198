"""What happens in a pipe, for those outside: counters, observers that are told, recordings.

The :class:`Ledger` belongs to the pipe, an :class:`Account` in it to one run. Counters change under
a lock that a signal handler may take again and a forked child finds free. A child counts from zero:
it has none of its parent's threads and runs.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from pipert.queues.process_lock import ProcessLock
from pipert.seeing.observers import Audience, Observer, Observers, RunInfo, TaskInfo
from pipert.seeing.ranges import profiler_looks
from pipert.seeing.recorder import Recorder, Recording
from pipert.status import BACKWARD, FORWARD, RECOMPUTATION

__all__: list[str] = []

T = TypeVar("T")

_counting = ProcessLock(reentrant=True)


class Ledger:
    """The counters and observers of one pipe. Any thread."""

    __slots__ = ("_pid", "ended", "live", "observers", "recomputations", "recordings", "runs")

    def __init__(self) -> None:
        self.observers = Observers()
        self.recordings: tuple[Recording, ...] = ()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.runs = 0
        self.recomputations = 0
        self.ended = {"succeeded": 0, "failed": 0}  # what is neither was cancelled
        self.live: weakref.WeakSet[Account] = weakref.WeakSet()

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._reset()

    def read(self) -> dict[str, int]:
        """The fields of ``status.Statistics`` that are numbers.

        An interrupt may keep a run from ending here; then its account is gone all the same, and
        what neither lives nor ended otherwise was cancelled.
        """
        with _counting.current:
            self._own()
            live, succeeded, failed = len(self.live), self.ended["succeeded"], self.ended["failed"]
            return {
                "runs": self.runs,
                "in_flight": live,
                "succeeded": succeeded,
                "failures": failed,
                "cancellations": self.runs - live - succeeded - failed,
                "recomputations": self.recomputations,
            }

    def open(self, m: int, n: int) -> Account:
        """A run of ``m`` micro-batches over ``n`` partitions is about to begin."""
        profiled = profiler_looks()  # before the lock: it may log
        with _counting.current:
            self._own()
            recorder = None
            if self.recordings or profiled:
                recorder = Recorder(self.runs, self.recordings)
            account = Account(self, RunInfo(self.runs, m, n), recorder)
            self.runs += 1
            self.live.add(account)
        return account

    def close(self, account: Account) -> None:
        """The run is over, as its outcome says."""
        with _counting.current:
            self.live.discard(account)
            if account.outcome in self.ended:
                self.ended[account.outcome] += 1

    def start_recording(self, recording: Recording) -> None:
        """Record the runs from now on."""
        with _counting.current:
            self.recordings = (*self.recordings, recording)

    def stop_recording(self, recording: Recording) -> None:
        """Record no further run; nothing more of those there are."""
        with _counting.current:
            self.recordings = tuple(one for one in self.recordings if one is not recording)
        recording.close()

    def count_recomputation(self) -> None:
        with _counting.current:
            self.recomputations += 1

    def __repr__(self) -> str:
        return f"<Ledger of {self.runs} runs>"


class Account:
    """One run's; a context around it.

    It references neither the run nor the pipe, since recomputations use it, too.
    """

    __slots__ = (
        "__weakref__", "_ledger", "_started", "audience", "is_step", "outcome", "recorder", "run",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, run: RunInfo, recorder: Recorder | None = None) -> None:
        self._ledger = ledger
        self.recorder = recorder
        self.is_step = False  # whether its recomputations are tasks, whose failures the call raises
        self._started = 0.0
        self.run = run
        self.audience = Audience(ledger.observers)
        self.outcome = "cancelled"  # as long as nobody knows better

    def __enter__(self) -> Account:
        self._started = perf_counter()
        try:
            self.audience.tell(lambda observer: observer.run_started(self.run))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def _end(self) -> None:
        seconds = perf_counter() - self._started
        self._ledger.close(self)
        self.audience.tell(lambda observer: observer.run_finished(self.run, seconds, self.outcome))

    def forward(
        self, i: int, j: int, device: torch.device, function: Callable[..., T], *args: Any
    ) -> T:
        """``function(*args)``, which is ``F[i,j]``."""
        if not self.audience:
            return function(*args)
        task = TaskInfo(self.run.number, FORWARD, j, i, device)
        return self.audience.watch(task, function, *args)

    def backward(
        self, i: int, j: int, device: torch.device, function: Callable[..., T], *args: Any
    ) -> T:
        """``function(*args)``, which is ``B[i,j]`` as a task of its own."""
        if not self.audience:
            return function(*args)
        task = TaskInfo(self.run.number, BACKWARD, j, i, device)
        return self.audience.watch(task, function, *args)

    def recomputation(
        self, i: int, j: int, device: torch.device, function: Callable[..., T], *args: Any
    ) -> T:
        """``function(*args)``, which is ``R[i,j]``."""
        self._ledger.count_recomputation()
        if not self.audience:
            return function(*args)
        task = TaskInfo(self.run.number, RECOMPUTATION, j, i, device)
        try:
            return self.audience.watch(task, function, *args)
        except BaseException as error:
            if not self.is_step:
                self.audience.tell(partial(_tell_failure, task, error))
            raise

    def failed(
        self, i: int, j: int, device: torch.device, error: BaseException, phase: str = FORWARD
    ) -> None:
        """``error`` of a task is about to be raised in the call."""
        task = TaskInfo(self.run.number, phase, j, i, device)
        self.audience.tell(partial(_tell_failure, task, error))

    def __repr__(self) -> str:
        return f"<Account of {self.run}>"


def _tell_failure(task: TaskInfo, error: BaseException, observer: Observer) -> None:
    observer.failed(task, error)
