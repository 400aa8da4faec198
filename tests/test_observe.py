"""Tests the events of observers, their threads, and that observers cannot break a run."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn

from pipert import Observer, Pipe, PipeClosedError, RunInfo
from tests.layers import Apply
from tests.observers import Log

X = torch.arange(8.0).reshape(8, 1)


def pipe_of(*layers: nn.Module, **options: Any) -> Pipe:
    n = len(layers)
    return Pipe(nn.Sequential(*layers), [1] * n, devices=["cpu"] * n, **options)


def linear() -> nn.Linear:
    return nn.Linear(1, 1)


def test_events_of_a_run_come_on_the_callers_thread_and_those_of_a_task_on_its_worker() -> None:
    log = Log()
    with pipe_of(linear(), linear()) as pipe:
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
    pipe = pipe_of(Apply(close), linear(), chunks=4)
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
@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_an_observer_that_raises_is_dropped_and_the_run_goes_on(
    event: str, kind: type[Exception]
) -> None:
    def broken(*_: Any) -> None:
        raise kind("broken observer")

    bad, good = Observer(), Log()
    setattr(bad, event, broken)
    with pipe_of(linear(), linear(), chunks=4) as pipe, TestCase().assertLogs("pipert") as logged:
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


@pytest.mark.parametrize("event", ["run_started", "run_finished"])
def test_an_interrupt_in_an_observer_on_the_main_thread_reaches_the_caller(event: str) -> None:
    def interrupted(*_: Any) -> None:
        setattr(observer, event, lambda *_: None)
        raise KeyboardInterrupt

    observer = Observer()
    setattr(observer, event, interrupted)
    with pipe_of(linear()) as pipe:
        pipe.add_observer(observer)
        with pytest.raises(KeyboardInterrupt):
            pipe(X)
        assert pipe.statistics().in_flight == 0
        pipe(X)


def test_an_observer_that_is_added_during_a_run_hears_of_the_next_one() -> None:
    log = Log()
    pipes: list[Pipe] = []

    def add(x: Tensor) -> Tensor:
        pipes[0].add_observer(log)
        return x

    with pipe_of(Apply(add), linear(), chunks=2) as pipe:
        pipes.append(pipe)
        pipe(X)
        assert log.events == []
        pipe(X)
        pipes.clear()
    assert log.of("run_started") == [RunInfo(1, 2, 2)]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_pipe_has_no_observers_and_counts_for_itself(
    copied: Callable[[Pipe], Pipe],
) -> None:
    log = Log()
    with pipe_of(linear()) as pipe:
        pipe.add_observer(log)
        pipe(X)
        with copied(pipe) as other:
            other(X)
            assert other.statistics().runs == 1
        assert len(log.of("run_started")) == 1
