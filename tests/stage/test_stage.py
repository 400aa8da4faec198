"""Tests one stage: what F[i,j] sends, and when it does not run.

Stages are driven by hand here, on the thread of the test.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.queues.closable import ClosableQueue
from pipert.workers.worker import NOT_RUN
from tests.layers import Apply
from tests.stages import Driven, do
from tests.wakeups import watch

TIMEOUT = 3.0  # s

# What is sent -------------------------------------------------------------------------------------


def test_the_output_of_the_layers_is_sent() -> None:
    (y,) = Driven([[Apply(torch.neg), Apply(torch.exp)]], [torch.ones(2)]).go()
    assert torch.equal(y, torch.exp(-torch.ones(2)))


@pytest.mark.parametrize("value", [None, 3, "three", [1, {"a": None}], ()], ids=repr)
def test_a_value_without_tensors_is_sent_as_it_is(value: Any) -> None:
    assert Driven([[nn.Identity()]], [value]).go() == [value]


def test_an_input_is_released_when_its_task_begins() -> None:
    inputs: list[Any] = [torch.ones(1), torch.ones(1)]
    there: list[bool] = []

    def look(x: Tensor) -> Tensor:
        there.extend(value is not None for value in inputs)
        return x

    Driven([[Apply(look)]], inputs).go()
    assert there == [False, True, False, False]


def test_an_input_comes_from_the_stage_before() -> None:
    assert Driven([[Apply(lambda x: x + 1)], [nn.Identity()]], [6]).go() == [7]


def links_that_call(before_waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes links call a function before a stage waits for a value."""

    def make() -> ClosableQueue[Any]:
        queue = ClosableQueue[Any]()
        watch(queue, before_waiting)
        return queue

    monkeypatch.setattr("pipert.stage.links.ClosableQueue", make)


def test_a_task_waits_for_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    links_that_call(waiting.set, monkeypatch)
    run = Driven([[nn.Identity()], [nn.Identity()]], [7])
    task, received = run.task("F[0,1]"), list[Any]()
    thread = threading.Thread(target=lambda: received.append(task.receive()))
    thread.start()
    assert waiting.wait(TIMEOUT) and not received
    run.do("F[0,0]")
    thread.join(TIMEOUT)
    assert received == [7]


# When a task does not run -------------------------------------------------------------------------


def never(x: Any) -> Any:
    raise AssertionError("this layer must not run")


def test_a_task_without_an_input_does_not_run() -> None:
    run = Driven([[Apply(never)]], [NOT_RUN])
    assert run.do("F[0,0]") == [NOT_RUN] and run.outcome.take_error() is None


def test_a_task_after_the_failed_one_does_not_run() -> None:
    run = Driven([[Apply(never)]], [1, 1])
    run.fail("F[0,0]", ValueError())
    assert run.do("F[1,0]") == [NOT_RUN]


def test_a_task_after_the_failed_one_does_not_wait_for_its_input() -> None:
    run = Driven([[Apply(never)], [Apply(never)]], [1, 1])
    run.fail("F[0,0]", ValueError())
    assert run.do("F[1,1]") == [NOT_RUN]


def test_a_task_that_comes_to_be_after_the_failed_one_while_it_waits_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links_that_call(lambda: fail_and_send(), monkeypatch)
    run = Driven([[nn.Identity()], [Apply(never)]], [1, 1])

    def fail_and_send() -> None:
        run.fail("F[0,1]", ValueError())
        run.stages[0].links.y.send(1, 1)

    # So the worker does not count it either.
    assert run.task("F[1,1]").receive() is NOT_RUN


def test_a_task_before_the_failed_one_runs() -> None:
    run = Driven([[nn.Identity()]], [1, 1])
    run.fail("F[1,0]", ValueError())
    assert run.do("F[0,0]") == [1]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_task_that_fails_raises_nothing_and_says_so(kind: type[BaseException]) -> None:
    error = kind()

    def fail(x: Any) -> Any:
        raise error

    run = Driven([[Apply(fail)]], [1])
    run.do("F[0,0]")
    assert run.outcome.take_error() is error


def test_a_task_that_fails_sends_that_there_is_no_output() -> None:
    assert Driven([[Apply(never)]], [1]).do("F[0,0]") == [NOT_RUN]


def test_a_task_that_is_abandoned_fails_and_sends_that_there_is_no_output() -> None:
    run, error = Driven([[Apply(never)]], [1]), ValueError()
    run.task("F[0,0]").abandon(error)
    assert run.run.outputs == [NOT_RUN] and run.outcome.take_error() is error


def test_a_task_that_is_abandoned_after_it_was_sent_has_not_failed() -> None:
    run = Driven([[nn.Identity()]], [1])
    task = run.task("F[0,0]")
    do(task)
    task.abandon(ValueError())
    assert run.run.outputs == [1] and run.outcome.take_error() is None


def test_the_repr_says_which_partition_of_which_run_it_is() -> None:
    (stage,) = Driven([[]], [0, 0, 0]).stages
    assert repr(stage) == "<Stage of partition 0 on cpu, <Outcome of m=3 n=1, running>>"
