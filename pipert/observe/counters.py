"""Counts the runs of one pipe, and keeps the observers and recordings to tell about them.

Counters change under a lock that a signal handler may take again and a forked child finds free. A
child counts from zero: it has none of its parent's threads and runs.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from time import perf_counter

from pipert.observe.notifier import Notifier
from pipert.observe.observers import Observer, Observers, RunInfo
from pipert.observe.ranges import is_profiled
from pipert.observe.recorder import Recorder, Recording
from pipert.queues.process_lock import ProcessLock
from pipert.schedules.plan import Plan

__all__: list[str] = []

_counting = ProcessLock(reentrant=True)


class Counters:
    """The counters, observers and recordings of one pipe. Thread-safe."""

    def __init__(self) -> None:
        self.observers: Observers = {}
        self.recordings: tuple[Recording, ...] = ()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.runs = 0
        self.recomputations = 0
        self.ended: Counter[str] = Counter()  # by outcome
        self.live: weakref.WeakSet[Notifier] = weakref.WeakSet()

    def _reset_in_child(self) -> None:
        if self._pid != os.getpid():
            self._reset()

    def read(self) -> dict[str, int]:
        """Return the fields of ``status.Statistics`` that are numbers.

        An interrupt may keep the end of a run from being counted. Nobody holds its ``Notifier``
        then; so a run that is neither live nor ended in another way was cancelled.
        """
        with _counting.current:
            self._reset_in_child()
            live, succeeded, failed = len(self.live), self.ended["succeeded"], self.ended["failed"]
            return {
                "runs": self.runs,
                "in_flight": live,
                "succeeded": succeeded,
                "failures": failed,
                "cancellations": self.runs - live - succeeded - failed,
                "recomputations": self.recomputations,
            }

    @contextlib.contextmanager
    def open(self, plan: Plan) -> Iterator[Notifier]:
        """Count a run of ``plan``, and tell observers when it begins and ends."""
        notifier = self.begin(plan)
        started = perf_counter()
        try:
            if notifier.is_observed:
                notifier.tell(lambda observer: observer.run_started(notifier.run))
            yield notifier
        finally:
            seconds = perf_counter() - started
            if notifier.recorder is not None and notifier.outcome != "succeeded":
                notifier.recorder.fail()
            with _counting.current:
                self.live.discard(notifier)
                self.ended[notifier.outcome] += 1
            if notifier.is_observed:
                run, outcome = notifier.run, notifier.outcome
                notifier.tell(lambda observer: observer.run_finished(run, seconds, outcome))

    def begin(self, plan: Plan) -> Notifier:
        """Count a run of ``plan`` that is about to begin."""
        profiled = is_profiled()  # before the lock: it may log
        with _counting.current:
            self._reset_in_child()
            recorder, is_step = None, plan.goes_back
            if self.recordings or profiled:
                recorder = Recorder(self.runs, self.recordings, is_step)
            info = RunInfo(self.runs, plan.m, plan.n)
            notifier = Notifier(info, self.observers, self._count_recomputation, is_step, recorder)
            self.runs += 1
            self.live.add(notifier)
        return notifier

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` about all runs that begin from now on."""
        if not isinstance(observer, Observer):
            raise TypeError(f"an observer must be a pipert.Observer, got {observer!r}")
        self.observers[id(observer)] = observer

    def remove_observer(self, observer: Observer) -> None:
        """Stop telling ``observer`` about runs."""
        self.observers.pop(id(observer), None)

    def start_recording(self, recording: Recording) -> None:
        """Record the runs that begin from now on."""
        with _counting.current:
            self.recordings = (*self.recordings, recording)

    def stop_recording(self, recording: Recording) -> None:
        """Record no further run, and no more of those in flight."""
        with _counting.current:
            self.recordings = tuple(one for one in self.recordings if one is not recording)
        recording.close()

    def _count_recomputation(self) -> None:
        with _counting.current:
            self.recomputations += 1

    def __repr__(self) -> str:
        return f"<Counters of {self.runs} runs>"
