"""The counters of one pipe, and who is to be told about its runs.

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

from pipert.queues.process_lock import ProcessLock
from pipert.schedules.plan import Plan
from pipert.seeing.observers import Observer, Observers, RunInfo
from pipert.seeing.ranges import profiler_looks
from pipert.seeing.recorder import Recorder, Recording
from pipert.seeing.told import Told

__all__: list[str] = []

_counting = ProcessLock(reentrant=True)


class Counters:
    """The counters, observers and recordings of one pipe. Any thread."""

    def __init__(self) -> None:
        self.observers: Observers = {}
        self.recordings: tuple[Recording, ...] = ()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.runs = 0
        self.recomputations = 0
        self.ended: Counter[str] = Counter()  # what neither succeeded nor failed was cancelled
        self.live: weakref.WeakSet[Told] = weakref.WeakSet()

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._reset()

    def read(self) -> dict[str, int]:
        """Return the fields of ``status.Statistics`` that are numbers.

        An interrupt may keep a run from ending here. Nobody holds its ``Told`` then, and a run that
        neither lives nor ended otherwise was cancelled.
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

    @contextlib.contextmanager
    def open(self, plan: Plan) -> Iterator[Told]:
        """Count a run of ``plan``, and tell observers of its beginning and its end."""
        told = self.begin(plan)
        started = perf_counter()
        try:
            told.tell(lambda observer: observer.run_started(told.run))
            yield told
        finally:
            seconds = perf_counter() - started
            if told.recorder is not None and told.outcome != "succeeded":
                told.recorder.fail()
            with _counting.current:
                self.live.discard(told)
                self.ended[told.outcome] += 1
            told.tell(lambda observer: observer.run_finished(told.run, seconds, told.outcome))

    def begin(self, plan: Plan) -> Told:
        """Count a run of ``plan`` that is about to begin."""
        profiled = profiler_looks()  # before the lock: it may log
        with _counting.current:
            self._own()
            recorder, is_step = None, plan.goes_back
            if self.recordings or profiled:
                recorder = Recorder(self.runs, self.recordings, is_step)
            info = RunInfo(self.runs, plan.m, plan.n)
            told = Told(info, self.observers, self._count_recomputation, is_step, recorder)
            self.runs += 1
            self.live.add(told)
        return told

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` about all runs from now on."""
        if not isinstance(observer, Observer):
            raise TypeError(f"an observer must be a pipert.Observer, got {observer!r}")
        self.observers[id(observer)] = observer

    def remove_observer(self, observer: Observer) -> None:
        """Stop telling ``observer`` about runs."""
        self.observers.pop(id(observer), None)

    def start_recording(self, recording: Recording) -> None:
        """Record the runs from now on."""
        with _counting.current:
            self.recordings = (*self.recordings, recording)

    def stop_recording(self, recording: Recording) -> None:
        """Record no further run, and nothing more of those in flight."""
        with _counting.current:
            self.recordings = tuple(one for one in self.recordings if one is not recording)
        recording.close()

    def _count_recomputation(self) -> None:
        with _counting.current:
            self.recomputations += 1

    def __repr__(self) -> str:
        return f"<Counters of {self.runs} runs>"
