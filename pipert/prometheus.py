"""Exports metrics to Prometheus, through the package ``prometheus_client`` (extra ``prometheus``).

>>> from prometheus_client import start_http_server
>>> from pipert.prometheus import PipeMetrics
>>> metrics = PipeMetrics()  # once, in the registry of the process
>>> metrics.add(pipe, "generator")
>>> start_http_server(9464)

====================================  =======  =================================================
``pipert_runs_total``                 counter  ``pipe``, ``outcome``: ``succeeded``, ``failed`` or
                                               ``cancelled``
``pipert_runs_in_flight``             gauge    ``pipe``
``pipert_recomputations_total``       counter  ``pipe``
``pipert_worker_tasks_total``         counter  ``pipe``, ``worker``
``pipert_worker_busy_seconds_total``  counter  ``pipe``, ``worker``
``pipert_worker_queue_depth``         gauge    ``pipe``, ``worker``
``pipert_worker_task_age_seconds``    gauge    ``pipe``, ``worker``; age of the current task, 0 if
                                               none: it keeps growing if the task is stuck
====================================  =======  =================================================

They are read from ``pipe.statistics()`` on request and cost nothing until then. A dropped pipe
ends its threads and disappears. All methods are thread-safe, and may be called at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "pipert.prometheus needs the package prometheus_client: pip install prometheus_client"
    ) from error

from pipert.status import WAITING

__all__ = ["PipeMetrics"]


class PipeMetrics(Collector):
    """The metrics of any number of pipes, distinguished by the label ``pipe``.

    Args:
        registry: where to register. One instance per registry is enough.

    Raises:
        ValueError: the registry already has metrics of these names.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._lock = threading.Lock()
        self._pipes = WeakValueDictionary[str, Any]()
        registry.register(self)

    def add(self, pipe: Any, name: str) -> None:
        """Show a pipe, of any kind, as ``name``, in place of another one of that name."""
        if not hasattr(pipe, "statistics"):
            raise TypeError(f"pipe must be a pipe, got {pipe!r}; write metrics.add(pipe, name)")
        with self._lock:
            self._pipes[name] = pipe

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics; before there is a pipe, their names."""
        of, each = ["pipe"], ["pipe", "worker"]
        runs = CounterMetricFamily("pipert_runs", "Calls ended.", labels=["pipe", "outcome"])
        in_flight = GaugeMetricFamily("pipert_runs_in_flight", "Calls not ended.", labels=of)
        recomputed = CounterMetricFamily("pipert_recomputations", "Tasks recomputed.", labels=of)
        tasks = CounterMetricFamily("pipert_worker_tasks", "Tasks ended.", labels=each)
        busy = CounterMetricFamily("pipert_worker_busy_seconds", "Time of tasks.", labels=each)
        depth = GaugeMetricFamily("pipert_worker_queue_depth", "Tasks not begun.", labels=each)
        age = GaugeMetricFamily("pipert_worker_task_age_seconds", "Time of the task.", labels=each)
        with self._lock:
            alive = [*self._pipes.items()]
        for name, pipe in alive:  # not under the lock, since pipes have their own
            now = pipe.statistics()
            runs.add_metric([name, "succeeded"], now.succeeded)
            runs.add_metric([name, "failed"], now.failures)
            runs.add_metric([name, "cancelled"], now.cancellations)
            in_flight.add_metric([name], now.in_flight)
            recomputed.add_metric([name], now.recomputations)
            for worker in now.workers:
                labels, task = [name, worker.name], worker.doing
                tasks.add_metric(labels, worker.tasks)
                busy.add_metric(labels, worker.busy_seconds)
                depth.add_metric(labels, worker.queue_depth)
                seconds = task.seconds if task and task.phase != WAITING else 0.0
                age.add_metric(labels, seconds)
        return [runs, in_flight, recomputed, tasks, busy, depth, age]

    describe = collect  # how a registry learns the names
