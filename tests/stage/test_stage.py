"""Tests one stage: what F[i,j] sends, and when it does not run.

Stages are driven by hand here, on the thread of the test.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert._torch import node_count
from pipert.stage.loss import Loss
from pipert.stage.step import Step
from pipert.workers.worker import NOT_RUN
from tests.layers import Apply
from tests.stages import Driven, do, do_nothing

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


def test_the_worker_is_notified_before_a_task_blocks_for_its_input() -> None:
    waiting = threading.Event()
    run = Driven([[nn.Identity()], [nn.Identity()]], [7])
    task, received = run.task("F[0,1]"), list[Any]()
    thread = threading.Thread(target=lambda: received.append(task.receive(waiting.set)))
    thread.start()
    assert waiting.wait(TIMEOUT) and not received
    run.do("F[0,0]")
    thread.join(TIMEOUT)
    assert received == [7]


def test_the_worker_is_not_notified_if_the_input_has_arrived() -> None:
    run = Driven([[nn.Identity()], [nn.Identity()]], [7])
    run.do("F[0,0]")
    told: list[bool] = []
    assert run.task("F[0,1]").receive(lambda: told.append(True)) == 7 and not told


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


def test_a_task_that_comes_to_be_after_the_failed_one_while_it_waits_does_not_run() -> None:
    run = Driven([[nn.Identity()], [Apply(never)]], [1, 1])

    def fail_and_send() -> None:
        run.fail("F[0,1]", ValueError())
        run.stages[0].links.y.send(1, 1)

    # So the worker does not count it either.
    assert run.task("F[1,1]").receive(fail_and_send) is NOT_RUN


def test_a_task_knows_how_long_its_layers_took_if_it_called_any() -> None:
    step = Step(Loss(nn.functional.mse_loss, [torch.zeros(1, 1)], [1.0], 1.0))
    run = Driven([[nn.Linear(1, 1)]], [torch.ones(1, 1)], recomputed=1, step=step)
    took = {}
    for action in run.plan:
        task = run.task(action)
        task.send(task.execute(task.receive(do_nothing)))
        took[action.kind] = task.layers_took
    assert took["F"] is not None and took["R"] is not None and took["B"] is None


def test_a_task_counts_the_nodes_that_its_layers_create() -> None:
    layers = [nn.Linear(1, 1), nn.Tanh()]
    before = node_count()
    nn.Sequential(*layers)(torch.ones(1, 1))
    created = node_count() - before
    task = Driven([layers], [torch.ones(1, 1)]).task("F[0,0]")
    task.send(task.execute(task.receive(do_nothing)))
    assert task.nodes == created > 0


def test_tasks_that_go_forward_take_turns_in_runs_in_turn() -> None:
    layers, inputs = [[nn.Linear(1, 1)], [nn.Linear(1, 1)]], [torch.ones(1, 1)] * 3
    step = Step(Loss(nn.functional.mse_loss, [torch.zeros(1, 1)] * 3, [1.0] * 3, 1.0))
    run = Driven(layers, inputs, recomputed=3, step=step)
    assert not any(run.task(action).takes_turn for action in run.plan)
    run.run.in_turn = True
    for action in run.plan:
        assert run.task(action).takes_turn == (action.kind in ("F", "R"))


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
