"""Tests what observers and statistics tell of calls and steps."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn

from pipert import (
    Observer,
    Pipe,
    PipeClosedError,
    RunInfo,
    Statistics,
    TaskInfo,
    is_recomputing,
)
from tests.helpers.event_log import Log
from tests.helpers.failing_steps import acting
from tests.helpers.pipes import pipe_of_layers as pipe_of
from tests.helpers.ways import CALL, Way, batch, each_way, linear, piped, take_step
from tests.layers import Apply

X = torch.arange(8.0).reshape(8, 1)


def unit() -> nn.Linear:
    return nn.Linear(1, 1)


@pytest.mark.layered  # names threads, not those of micro-batches
def test_events_of_a_run_come_on_the_callers_thread_and_those_of_a_task_on_its_worker() -> None:
    log = Log()
    with pipe_of(unit(), unit()) as pipe:
        pipe.add_observer(log)
        pipe(X)
    for event, thread in log.threads:
        of_run = event.startswith("run")
        assert (thread is threading.current_thread()) == of_run
        assert of_run or thread.name in ("pipert-cpu-0", "pipert-cpu-1")


def test_a_run_that_meets_the_end_of_the_pipe_is_cancelled() -> None:
    pipes: list[Pipe] = []

    def close(x: Tensor) -> Tensor:
        pipes[0].close()
        return x

    log = Log()
    pipe = pipe_of(Apply(close), unit(), chunks=4)
    pipes.append(pipe)
    pipe.add_observer(log)
    with pytest.raises(PipeClosedError):
        pipe(X)
    pipes.clear()
    assert log.of("run_finished") == [[RunInfo(0, 4, 2), "cancelled"]]
    assert log.of("failed") == []
    assert pipe.statistics().cancellations == 1


EVENTS = ["run_started", "run_finished", "task_started", "task_finished"]


@pytest.mark.parametrize("event", EVENTS)
def test_an_observer_that_raises_is_dropped_and_the_run_goes_on(event: str) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("broken observer")

    bad, good = Observer(), Log()
    setattr(bad, event, broken)
    with pipe_of(unit(), unit(), chunks=4) as pipe, TestCase().assertLogs("pipert") as logged:
        plain = nn.Sequential(*pipe)
        pipe.add_observer(bad)
        pipe.add_observer(good)
        assert pipe(X).equal(plain(X))
        pipe(X)
        assert len(good.of("run_finished")) == 2
        assert len(good.of("task_finished")) == 16
    lines = [line for line in logged.output if "is told nothing more" in line]
    # Two workers may be in it at the same moment, before it is dropped.
    assert 1 <= len(lines) <= 2


@pytest.mark.main_thread
@pytest.mark.parametrize("event", ["run_started", "run_finished"])
def test_an_interrupt_in_an_observer_on_the_main_thread_reaches_the_caller(event: str) -> None:
    def interrupted(*_: Any) -> None:
        setattr(observer, event, lambda *_: None)
        raise KeyboardInterrupt

    observer = Observer()
    setattr(observer, event, interrupted)
    with pipe_of(unit()) as pipe:
        pipe.add_observer(observer)
        with pytest.raises(KeyboardInterrupt):
            pipe(X)
        assert pipe.statistics().in_flight == 0
        pipe(X)


WAIT = 10.0  # s


class Gate:
    """A layer's function that blocks until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.open.wait(WAIT)
        return x


def test_statistics_show_a_workers_task_while_it_runs() -> None:
    gate = Gate()
    with pipe_of(Apply(gate), unit(), chunks=2) as pipe:
        thread = threading.Thread(target=pipe, args=(X,))
        thread.start()
        assert gate.entered.wait(WAIT)
        seen = pipe.statistics()
        later = pipe.statistics()
        gate.open.set()
        thread.join(WAIT)
    assert seen.in_flight == 1
    first = seen.workers[0].doing
    assert first is not None and first == TaskInfo(0, "forward", 0, 0, CPU, first.seconds)
    second = seen.workers[1].doing
    assert second is None or second.phase == "waiting for input" and second.partition == 1
    assert later.workers[0].busy_seconds > seen.workers[0].busy_seconds > 0
    assert later.workers[1].busy_seconds == 0


@pytest.fixture
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_often")  # or each task waits 5 ms for the thread that asks
def test_a_thread_may_ask_while_others_call_and_every_number_only_grows() -> None:
    done = threading.Event()
    seen: list[Statistics] = []

    def ask() -> None:
        while not done.is_set():
            seen.append(pipe.statistics())

    with pipe_of(unit(), unit(), chunks=4) as pipe:
        asking = threading.Thread(target=ask)
        asking.start()
        callers = [
            threading.Thread(target=lambda: [pipe(X) for _ in range(4)]) for _ in range(3)
        ]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join(WAIT)
        done.set()
        asking.join(WAIT)
        last = pipe.statistics()
    assert (last.runs, last.succeeded, [w.tasks for w in last.workers]) == (12, 12, [48, 48])
    for before, after in zip(seen, seen[1:], strict=False):
        assert before.runs <= after.runs
        assert 0 <= after.in_flight <= 3 and after.succeeded >= before.succeeded
        for one, other in zip(before.workers, after.workers, strict=True):
            assert one.tasks <= other.tasks and one.busy_seconds <= other.busy_seconds


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


def test_a_step_that_fails_after_its_tasks_has_failed() -> None:
    def no(_: Tensor) -> None:
        raise ValueError("no")

    log, way = Log(), Way("1f1b", "never")
    with piped(three(), [2, 1], way, chunks=M) as pipe:
        pipe.add_observer(log)
        weight: Any = next(pipe.parameters())
        weight.register_hook(no)
        with pipe.record() as timeline, pytest.raises(ValueError, match="no"):
            take_step(pipe, way, batch(2 * M))
        seen = pipe.statistics()
    assert log.of("run_finished")[0] == [RunInfo(0, M, N), "failed"]
    assert (seen.runs, seen.succeeded, seen.failures, seen.cancellations) == (1, 0, 1, 0)
    assert timeline.failed == {0}
    with pytest.raises(ValueError, match="no complete call in this timeline, and 1 that failed"):
        timeline.report()
