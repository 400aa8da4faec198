"""Tests the metrics for Prometheus, which keep no pipe alive and may be read at any moment."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, PipelineTimeout
from tests.faults.stuck import WAIT, WHERES, Stuck
from tests.helpers.activations import until
from tests.helpers.caller_threads import Caller

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from pipert import prometheus  # noqa: E402
from pipert.prometheus import PipeMetrics  # noqa: E402

ROWS = torch.ones(8, 4)


class Gate(nn.Module):
    """Waits, while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.open = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.reached.set()
        assert self.open.wait(30)
        return x


def two(first: nn.Module | None = None, timeout: float | None = None) -> Pipe:
    layers = nn.Sequential(first or nn.Linear(4, 4), nn.Linear(4, 1))
    where, mode = ["cpu", "cpu"], "except_last"
    return Pipe(layers, [1, 1], devices=where, chunks=4, checkpoint=mode, timeout=timeout)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PipeMetrics:
    return PipeMetrics(registry)


@pytest.fixture
def pipe(metrics: PipeMetrics) -> Iterator[Pipe]:
    with two() as pipe:
        metrics.add(pipe, "a")
        yield pipe


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Parses the exposition text: ``name{label=value,...}`` to the value."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


# What is counted


def test_runs_are_counted_by_outcome(metrics: PipeMetrics, registry: CollectorRegistry) -> None:
    gate = Gate()
    gate.open.set()
    with two(gate, timeout=0.05) as pipe:
        metrics.add(pipe, "a")
        for _ in range(3):
            pipe(ROWS, timeout=30)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pipe(torch.ones(8, 5), timeout=30)
        gate.open.clear()
        with pytest.raises(PipelineTimeout):
            pipe(ROWS)
        gate.open.set()
        pipe.timeout = None
    found = samples(registry)
    assert found["pipert_runs_total{outcome=succeeded,pipe=a}"] == 3
    assert found["pipert_runs_total{outcome=failed,pipe=a}"] == 1
    assert found["pipert_runs_total{outcome=cancelled,pipe=a}"] == 1


@pytest.mark.parametrize("where", WHERES)
def test_metrics_show_a_workers_task_while_it_runs(
    metrics: PipeMetrics, registry: CollectorRegistry, where: str
) -> None:
    waits, age = (
        f"pipert_worker_task_age_seconds{{pipe=a,worker=pipert-cpu-{j}}}" for j in range(2)
    )
    with Stuck(where=where) as stuck:
        metrics.add(stuck.pipe, "a")
        caller = Caller(stuck.run, WAIT)
        assert stuck.layer.entered.wait(WAIT)
        assert until(lambda: samples(registry)[waits] == 0)  # for input, which is not its task
        before, after = samples(registry), samples(registry)
        stuck.let_go()
        caller.result()
        ended = samples(registry)
    assert 0 < before[age] < after[age]
    assert before["pipert_runs_in_flight{pipe=a}"] == 1
    assert (ended[age], ended["pipert_runs_in_flight{pipe=a}"]) == (0, 0)


def test_metrics_have_the_documented_names(pipe: Pipe, registry: CollectorRegistry) -> None:
    pipe(ROWS)
    table = re.findall(r"^``(\w+)`` +(\w+)", prometheus.__doc__ or "", re.MULTILINE)
    lines = re.findall(r"^# TYPE (\w+) (\w+)$", generate_latest(registry).decode(), re.MULTILINE)
    assert sorted(table) == sorted(line for line in lines if not line[0].endswith("_created"))
    assert samples(registry)["pipert_worker_tasks_total{pipe=a,worker=pipert-cpu-1}"] == 4


# The life of a pipe


@pytest.mark.layered  # a pipeline goes with the collection of its cycles
def test_a_dropped_pipe_ends_its_threads_and_disappears(
    metrics: PipeMetrics, registry: CollectorRegistry
) -> None:
    gc.disable()
    try:
        pipe = two()
        metrics.add(pipe, "a")
        pipe(ROWS)
        samples(registry)
        threads = [t for t in threading.enumerate() if t.name.startswith("pipert-")]
        reference = weakref.ref(pipe)
        del pipe
        assert reference() is None
        for thread in threads:
            thread.join(10)
        assert threads and not any(thread.is_alive() for thread in threads)
        assert samples(registry) == {}
    finally:
        gc.enable()
    with two() as other:
        metrics.add(other, "a")  # the name is free
