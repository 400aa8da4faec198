"""Exports metrics to Prometheus, through the package ``prometheus_client`` (extra ``prometheus``).

Nothing else in pipert imports this module.

>>> from prometheus_client import start_http_server
>>> from pipert.prometheus import PipeMetrics
>>> metrics = PipeMetrics()  # once, in the registry of the process
>>> metrics.add(pipe, "generator")
>>> start_http_server(9464)

=====================================  =========  ===============================================
``pipert_runs_total``                  counter    ``pipe``, ``outcome``: ``succeeded``, ``failed``
                                                  or ``cancelled``
``pipert_runs_in_flight``              gauge      ``pipe``
``pipert_recomputations_total``        counter    ``pipe``
``pipert_worker_tasks_total``          counter    ``pipe``, ``worker``; tasks of the worker
``pipert_worker_busy_seconds_total``   counter    ``pipe``, ``worker``
``pipert_worker_queue_depth``          gauge      ``pipe``, ``worker``
``pipert_worker_task_age_seconds``     gauge      ``pipe``, ``worker``; age of the current task, 0
                                                  if none: it keeps growing if the task is stuck
``pipert_run_duration_seconds``        histogram  ``pipe``, ``outcome``
``pipert_task_duration_seconds``       histogram  ``pipe``, ``partition``, ``phase``: ``forward``,
                                                  ``recomputation`` or, in a step, ``backward``
                                                  or ``weight gradient``
``pipert_failures_total``              counter    ``pipe``, ``exception``: the name of its type
=====================================  =========  ===============================================

The first seven are read from ``pipe.statistics()`` on request and cost nothing until then. The
others come from an observer, which costs two clock readings and one histogram update per task.

Pipes are referenced weakly: a dropped pipe ends its threads and disappears from the metrics. All
methods are thread-safe, and may be called while the pipes are running.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "pipert.prometheus needs the package prometheus_client: pip install prometheus_client"
    ) from error

from pipert.observe.event import Observer, RunInfo, TaskInfo
from pipert.status import WAITING, Statistics, WorkerStatistics

__all__ = ["AnyPipe", "PipeMetrics"]

_BUCKETS = (
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
)  # fmt: skip


class AnyPipe(Protocol):
    """A pipe of one process, or one process's part of a :class:`pipert.distributed.Pipe`."""

    def statistics(self) -> Statistics: ...

    def add_observer(self, observer: Observer) -> None: ...

    def remove_observer(self, observer: Observer) -> None: ...


class PipeMetrics(Collector):
    """The metrics of any number of pipes, distinguished by the label ``pipe``.

    Args:
        registry: where to register. One instance per registry is enough.
        buckets: upper bounds of the histograms, in seconds.

    Raises:
        ValueError: the registry already has metrics of these names.
    """

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, buckets: Sequence[float] = _BUCKETS
    ) -> None:
        self._buckets = tuple(buckets)
        self._lock = threading.Lock()
        self._pipes: dict[str, tuple[weakref.ref[AnyPipe], _Durations]] = {}
        registry.register(self)

    def add(self, pipe: AnyPipe, name: str) -> None:
        """Show ``pipe`` as ``name``. Its durations and failures count from now on.

        Raises:
            ValueError: another live pipe has that name.
            TypeError: ``pipe`` is no pipe.
        """
        if not hasattr(pipe, "add_observer"):
            raise TypeError(f"pipe must be a pipe, got {pipe!r}; write metrics.add(pipe, name)")
        durations = _Durations(name, self._buckets)
        with self._lock:
            if name in self._alive():
                raise ValueError(f"there is a pipe called {name!r} already; remove it, or rename")
            pipe.add_observer(durations)
            self._pipes[name] = (weakref.ref(pipe), durations)

    def remove(self, name: str) -> None:
        """Stop showing the pipe called ``name``.

        Raises:
            KeyError: no pipe has that name.
        """
        with self._lock:
            reference, durations = self._pipes.pop(name)
        pipe = reference()
        if pipe is not None:
            pipe.remove_observer(durations)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, to tell the registry their names."""
        return [*_families([]), *_merged([_Durations("", self._buckets)])]

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics."""
        with self._lock:
            alive = self._alive()
            self._pipes = {name: self._pipes[name] for name in alive}
            durations = [durations for _, durations in self._pipes.values()]
        # Outside the lock, since statistics take the pipe's own lock.
        figures = [(name, pipe.statistics()) for name, pipe in alive.items()]
        return [*_families(figures), *_merged(durations)]

    def _alive(self) -> dict[str, AnyPipe]:
        pipes = {name: reference() for name, (reference, _) in self._pipes.items()}
        return {name: pipe for name, pipe in pipes.items() if pipe is not None}

    def __repr__(self) -> str:
        return f"<PipeMetrics of {sorted(self._pipes)}>"


class _Durations(Observer):
    """An observer that measures one pipe, without a reference to it."""

    def __init__(self, pipe: str, buckets: Sequence[float]) -> None:
        self._pipe = pipe
        self._runs = Histogram(
            "pipert_run_duration_seconds", "Time of a call of the pipe.",
            ["pipe", "outcome"], registry=None, buckets=buckets,
        )  # fmt: skip
        self._tasks = Histogram(
            "pipert_task_duration_seconds", "Time of a task: a partition on a micro-batch.",
            ["pipe", "partition", "phase"], registry=None, buckets=buckets,
        )  # fmt: skip
        self._failures = Counter(
            "pipert_failures", "Calls and backwards that failed, by type of exception.",
            ["pipe", "exception"], registry=None,
        )  # fmt: skip

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        self._runs.labels(self._pipe, outcome).observe(seconds)

    def task_finished(self, task: TaskInfo, seconds: float) -> None:
        self._tasks.labels(self._pipe, str(task.partition), task.phase).observe(seconds)

    def failed(self, task: TaskInfo, error: BaseException) -> None:
        self._failures.labels(self._pipe, type(error).__name__).inc()

    def collect(self) -> list[Metric]:
        return [*self._runs.collect(), *self._tasks.collect(), *self._failures.collect()]

    def __repr__(self) -> str:
        return f"<durations of {self._pipe!r}, for Prometheus>"


def _merged(observers: Iterable[_Durations]) -> list[Metric]:
    """Merges the metrics of all pipes by name, since a registry shows each name once."""
    merged: dict[str, Metric] = {}
    for observer in observers:
        for metric in observer.collect():
            empty = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            merged.setdefault(metric.name, empty).samples.extend(metric.samples)
    return list(merged.values())


def _age(worker: WorkerStatistics) -> float:
    doing = worker.doing
    return doing.seconds if doing is not None and doing.phase != WAITING else 0.0


_OF_PIPES = (
    (GaugeMetricFamily, "runs_in_flight", "Calls that are not over.", attrgetter("in_flight")),
    (CounterMetricFamily, "recomputations", "Tasks recomputed in a backward.",
     attrgetter("recomputations")),
)  # fmt: skip
_OF_WORKERS = (
    (CounterMetricFamily, "tasks", "Tasks that are over, of any phase.", attrgetter("tasks")),
    (CounterMetricFamily, "busy_seconds", "Time spent on tasks.", attrgetter("busy_seconds")),
    (GaugeMetricFamily, "queue_depth", "Tasks posted and not begun.", attrgetter("queue_depth")),
    (GaugeMetricFamily, "task_age_seconds", "Time the current task has taken.", _age),
)


def _families(pipes: Sequence[tuple[str, Statistics]]) -> Iterator[Metric]:
    """Converts ``pipe.statistics()`` of each named pipe to metrics."""
    runs = CounterMetricFamily(
        "pipert_runs", "Calls of the pipe that are over.", labels=["pipe", "outcome"]
    )
    for name, figures in pipes:
        runs.add_metric([name, "succeeded"], figures.succeeded)
        runs.add_metric([name, "failed"], figures.failures)
        runs.add_metric([name, "cancelled"], figures.cancellations)
    yield runs
    for kind, what, text, value in _OF_PIPES:
        family = kind(f"pipert_{what}", text, labels=["pipe"])
        for name, figures in pipes:
            family.add_metric([name], value(figures))
        yield family
    for kind, what, text, of_worker in _OF_WORKERS:
        family = kind(f"pipert_worker_{what}", text, labels=["pipe", "worker"])
        for name, figures in pipes:
            for worker in figures.workers:
                family.add_metric([name, worker.name], of_worker(worker))
        yield family
