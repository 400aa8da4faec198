"""Tests the end of a run, in the caller, if a wait for its reads fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipert.autograd.streams import CopyStreams
from pipert.observe.counters import Counters
from pipert.schedules.plan import plan_call
from pipert.stage.run import Run
from pipert.workers.context import CallerContext

CPU = torch.device("cpu")


def run_with_sources(count: int) -> Run:
    plan = plan_call(2, 1, [0])
    run = Run(plan, [CPU], CallerContext(), CopyStreams(), Counters().begin(plan))
    for i in range(count):
        source: Any = i  # stands for a stream
        run.sources[CPU, i] = source
    return run


def waits(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[Any]:
    """Collects the sources that a run waits for; the second wait raises."""
    awaited: list[Any] = []

    def wait(_: Any, source: Any) -> None:
        awaited.append(source)
        if len(awaited) == 2:
            raise error

    monkeypatch.setattr("pipert.stage.run.wait", wait)
    return awaited


def test_a_device_that_takes_no_wait_does_not_hide_the_error_of_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits(monkeypatch, RuntimeError("CUDA error"))
    run, error = run_with_sources(2), ArithmeticError()
    run.outcome.fail(0, error)
    run.return_what_was_read()
    assert run.outcome.take_error() is error


def test_a_wait_that_fails_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    waits(monkeypatch, RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        run_with_sources(2).return_what_was_read()


def test_an_interrupt_does_not_cut_the_waits_short(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = waits(monkeypatch, KeyboardInterrupt())
    run = run_with_sources(3)
    run.outcome.fail(0, ArithmeticError())
    with pytest.raises(KeyboardInterrupt):
        run.return_what_was_read()
    assert awaited[2:] == [0, 1, 2]
    assert run.outcome.take_error() is None
