"""Tests that nothing is left of a call given up, interrupted, or left by a forked child."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipert import Observer, Pipe, PipelineTimeout, ReentrantCallError, TaskInfo
from tests.activations import until
from tests.faults.stuck import Stuck


def test_a_with_statement_does_not_wait_for_the_layer_of_a_call_that_timed_out() -> None:
    stuck = Stuck()  # without a limit of its own
    with pytest.raises(PipelineTimeout):
        with stuck.pipe:
            stuck.times_out()
            raise PipelineTimeout
    assert not stuck.layer.go_on.is_set()
    threads = list(stuck.pipe._runtime.pool._threads)
    stuck.let_go()
    assert until(lambda: not any(thread.is_alive() for thread in threads))


def test_an_observer_that_calls_the_pipe_in_a_task_is_refused_and_dropped() -> None:
    refused: list[BaseException] = []

    class Calls(Observer):
        def task_started(self, task: TaskInfo) -> None:
            try:
                pipe(torch.ones(2, 1))
            except ReentrantCallError as error:
                refused.append(error)
                raise

    with Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"]) as pipe:
        pipe.add_observer(Calls())
        pipe(torch.ones(2, 1))
        pipe(torch.ones(2, 1))
    assert len(refused) == 1
