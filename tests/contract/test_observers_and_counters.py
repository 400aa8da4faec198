"""Tests the events and counters of tasks and failures, in a call and in a step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from pipert import RunInfo, TaskInfo, is_recomputing
from tests.contract.ways import CALL, Way, batch, each_way, linear, piped, take_step
from tests.layers import Apply
from tests.observers import Log
from tests.step.faulty import acting

CPU = torch.device("cpu")
M, N = 3, 2
EACH = {(i, j) for i in range(M) for j in range(N)}

phases = pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])
checkpointed = pytest.mark.parametrize(
    "way", [Way(schedule, "always") for schedule in (CALL, "gpipe", "1f1b")], ids=str
)


def recomputed(way: Way) -> int:
    return {"always": M, "except_last": M - 1, "never": 0}[way.checkpoint]


def three() -> nn.Sequential:
    return nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3))


@each_way
def test_observers_see_each_task_begin_and_end_once(way: Way) -> None:
    log = Log()
    with piped(three(), [2, 1], way, chunks=M) as pipe:
        pipe.add_observer(log)
        take_step(pipe, way, batch(2 * M))
    tasks = {"forward": EACH, "recomputation": {(i, j) for i, j in EACH if i < recomputed(way)}}
    if way.schedule != CALL:  # there it is autograd's
        tasks["backward"] = EACH
    if way.schedule == "zb-h1":
        tasks["weight gradient"] = EACH
    told = Counter(TaskInfo(0, phase, j, i, CPU) for phase in tasks for i, j in tasks[phase])
    for event in ("task_started", "task_finished"):
        assert Counter(log.of(event)) == told
    assert log.of("run_started") == [RunInfo(0, M, N)]
    assert log.of("run_finished") == [[RunInfo(0, M, N), "succeeded"]]
    assert log.events[0][0] == "run_started"


@each_way
def test_runs_tasks_and_recomputations_are_counted(way: Way) -> None:
    with piped(three(), [2, 1], way, chunks=M) as pipe:
        for _ in range(2):
            take_step(pipe, way, batch(2 * M))
        seen = pipe.statistics()
    assert (seen.runs, seen.succeeded, seen.in_flight, seen.failures) == (2, 2, 0, 0)
    assert seen.recomputations == 2 * recomputed(way) * N
    of_step = M if way.schedule == CALL else 2 * M + recomputed(way)
    of_step += M * (way.schedule == "zb-h1")
    assert [worker.tasks for worker in seen.workers] == [2 * of_step] * N
    assert all(worker.busy_seconds > 0 and worker.doing is None for worker in seen.workers)


@checkpointed
@phases
def test_a_failure_is_told_and_counted_once_with_its_task(way: Way, phase: str) -> None:
    """In a call a backward is no task, and a recomputation fails when the run is over."""

    def no() -> None:
        raise ValueError("no")

    def function(x: torch.Tensor) -> torch.Tensor:
        if phase == ("recomputation" if is_recomputing() else "forward"):
            no()
        return acting(x, no) if phase == "backward" else x.exp()

    log = Log()
    with piped(nn.Sequential(linear(3, 3), Apply(function)), [1, 1], way, chunks=M) as pipe:
        pipe.add_observer(log)
        with pytest.raises(ValueError, match="no"):
            take_step(pipe, way, batch(2 * M))
        seen = pipe.statistics()
    first = M - 1 if phase != "forward" and way.schedule in (CALL, "gpipe") else 0
    is_task = way.schedule != CALL or phase != "backward"
    fails_run = way.schedule != CALL or phase == "forward"
    task = TaskInfo(0, phase, 1, first, CPU)
    assert log.of("failed") == [[task, ValueError]] * is_task
    assert (task in log.of("task_finished")) == is_task
    assert log.of("run_finished") == [[RunInfo(0, M, N), "failed" if fails_run else "succeeded"]]
    assert (seen.runs, seen.failures, seen.succeeded) == (1, fails_run, not fails_run)
    assert (seen.cancellations, seen.in_flight) == (0, 0)
