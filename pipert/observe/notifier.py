"""Counts the runs of a pipe, and tells observers, recordings and profilers what each run does.

Whether there are any is decided when the run begins. If there are none, its stages are assembled
without the parts that tell, so that these cost nothing.

Counters change under a lock that a signal handler may take again and a forked child finds free. A
child counts from zero: it has none of its parent's threads and runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch

from pipert.observe.backward import interrupt
from pipert.observe.event import Observer, Observers, RunInfo, TaskInfo, kind_of
from pipert.observe.ranges import is_profiled, task_range
from pipert.observe.recorder import Recorder, Recording, Span
from pipert.queues.process_lock import ProcessLock
from pipert.schedules.action import Action
from pipert.schedules.plan import Plan

_log = logging.getLogger("pipert")

_counting = ProcessLock(reentrant=True)


@dataclass(eq=False, repr=False)
class Notifier:
    """Tells observers, recordings and profilers about one run. Thread-safe.

    References neither the run nor the pipe: recomputations outlive the run, and maybe the pipe.
    """

    run: RunInfo
    """What observers are told about the run."""
    _observers: Observers
    """The observers of the pipe. Those present when the run begins are told about it."""
    count_recomputation: Callable[[], None]
    """Called for each recomputation."""
    _is_step: bool
    """Whether the run goes backward as well. Then an error in a recomputation fails a task, ``R``
    or ``B``, and is told once: when the call raises it."""
    recorder: Recorder | None = None
    """The recorder, if the run is recorded or profiled."""
    outcome: str = "cancelled"
    """``'cancelled'`` until the run has succeeded or failed."""

    def __post_init__(self) -> None:
        self._listeners = tuple(self._observers.values())
        self.is_observed = bool(self._listeners)
        self.is_watched = self.is_observed or self.recorder is not None  # whether anybody is told

    def tell(self, about: Callable[[Observer], None]) -> None:
        """Call ``about`` with each observer; drop an observer for which it raises."""
        for observer in self._listeners:
            if id(observer) not in self._observers:
                continue  # removed meanwhile, or dropped
            try:
                about(observer)
            except BaseException as error:  # noqa: B036
                # What a signal handler raises on the main thread is not the observer's fault.
                on_main_thread = threading.current_thread() is threading.main_thread()
                if on_main_thread and not isinstance(error, Exception):
                    raise
                self._observers.pop(id(observer), None)
                text = traceback.format_exc()  # not the exception, which may keep tensors alive
                _log.error("%r raised and is told nothing more: %s", observer, text)

    def failed(self, action: Action, device: torch.device, error: BaseException) -> None:
        """Tell observers that ``error`` of an action is about to be raised."""
        task = self._task(action, device)
        self.tell(lambda observer: observer.failed(task, error))

    @contextlib.contextmanager
    def observed(self, action: Action, device: torch.device) -> Iterator[None]:
        """Tell observers when the block, a task, begins and ends."""
        task = self._task(action, device)
        self.tell(lambda observer: observer.task_started(task))
        started = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - started
            self.tell(lambda observer: observer.task_finished(task, seconds))

    @contextlib.contextmanager
    def recorded(self, action: Action, device: torch.device) -> Iterator[Span]:
        """Record the block as a task, and show it to profilers; only if there is a recorder."""
        assert self.recorder is not None
        with self.recorder.during(kind_of(action), action.i, action.j, device) as span:
            with task_range(str(action), device):
                yield span

    @contextlib.contextmanager
    def watched(self, action: Action, device: torch.device) -> Iterator[Span | None]:
        """Observe and record the block, a task, for whoever is told."""
        with contextlib.ExitStack() as stack:
            if self.is_observed:
                stack.enter_context(self.observed(action, device))
            span = None
            if self.recorder is not None:
                span = stack.enter_context(self.recorded(action, device))
            yield span

    @contextlib.contextmanager
    def recomputing(self, action: Action, device: torch.device) -> Iterator[None]:
        """Record and observe a recomputation; in a call, tell of its failure, too."""
        try:
            with contextlib.ExitStack() as stack:
                if self.recorder is not None:
                    # So that no backward recorded on this thread takes this time for its own.
                    interrupt(device)
                    stack.callback(interrupt, device)
                stack.enter_context(self.watched(action, device))
                yield
        except BaseException as error:
            if self.is_observed and not self._is_step:
                self.failed(action, device, error)
            raise

    def _task(self, action: Action, device: torch.device) -> TaskInfo:
        return TaskInfo(self.run.number, action.phase, action.j, action.i, device)


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
