"""The metrics for Prometheus of whole steps."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipert import Pipe, is_recomputing
from tests.layers import Apply
from tests.step.faulty import acting

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from pipert.prometheus import PipeMetrics  # noqa: E402

X, Y = torch.ones(8, 3), torch.zeros(8, 3)
WORKERS = ("pipert-cpu-0", "pipert-cpu-1")
WAIT = 10.0  # s


def two(second: nn.Module, checkpoint: str = "always") -> tuple[Pipe, CollectorRegistry]:
    registry = CollectorRegistry()
    layers = nn.Sequential(nn.Linear(3, 3), second)
    pipe = Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    PipeMetrics(registry).add(pipe, "a")
    return pipe, registry


def samples(registry: CollectorRegistry) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def step(pipe: Pipe) -> None:
    pipe.forward_backward(X, target=Y, loss_fn=functional.mse_loss)


def test_tasks_of_all_phases_are_counted() -> None:
    pipe, registry = two(nn.Linear(3, 3))
    with pipe:
        step(pipe)
        found = samples(registry)
    assert found["pipert_runs_total{outcome=succeeded,pipe=a}"] == 1
    assert found["pipert_recomputations_total{pipe=a}"] == 8
    for worker in WORKERS:
        assert found[f"pipert_worker_tasks_total{{pipe=a,worker={worker}}}"] == 12
        assert found[f"pipert_worker_task_age_seconds{{pipe=a,worker={worker}}}"] == 0
    for partition in (0, 1):
        for phase in ("forward", "recomputation", "backward"):
            labels = f"partition={partition},phase={phase},pipe=a"
            assert found[f"pipert_task_duration_seconds_count{{{labels}}}"] == 4
            assert found[f"pipert_task_duration_seconds_sum{{{labels}}}"] > 0


@pytest.mark.parametrize("phase", ["recomputation", "backward"])
def test_the_age_of_a_task_that_goes_back_shows_while_it_does(phase: str) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert go_on.wait(WAIT)

    def blocks(x: Tensor) -> Tensor:
        if phase == "recomputation" and is_recomputing():
            block()
        return acting(x, block) if phase == "backward" else x.exp()

    pipe, registry = two(Apply(blocks))
    with pipe:
        caller = threading.Thread(target=step, args=(pipe,))
        caller.start()
        assert entered.wait(WAIT)
        found = samples(registry)
        go_on.set()
        caller.join(WAIT)
    assert found["pipert_worker_task_age_seconds{pipe=a,worker=pipert-cpu-1}"] > 0


def test_a_failure_is_counted_once() -> None:
    def no() -> None:
        raise ValueError

    pipe, registry = two(Apply(lambda x: acting(x, no)))
    with pipe:
        with pytest.raises(ValueError):
            step(pipe)
    assert samples(registry)["pipert_failures_total{exception=ValueError,pipe=a}"] == 1
