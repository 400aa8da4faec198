"""Tests what observers, statistics, timelines, profilers and Prometheus show of a whole step."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipert import Pipe, RunInfo, Timeline
from tests.layers import Apply
from tests.observers import Log
from tests.pipes import pipe_of_layers
from tests.step.faulty import acting

M, N = 4, 3
EACH = {(i, j) for i in range(M) for j in range(N)}
MODES = [("always", M), ("except_last", M - 1), ("never", 0)]
X, Y = torch.arange(24.0).reshape(8, 3) / 24, torch.ones(8, 3)

modes = pytest.mark.parametrize(("checkpoint", "recomputed"), MODES)


pipe_of = partial(pipe_of_layers, chunks=M)


def three(checkpoint: str | None = None) -> Pipe:
    return pipe_of(*[nn.Linear(3, 3) for _ in range(N)], checkpoint=checkpoint)


def step(pipe: Pipe, **options: Any) -> Any:
    return pipe.forward_backward(
        X, **{"target": Y, "loss_fn": functional.mse_loss, **options}
    )


# Observers ----------------------------------------------------------------------------------------


class Fails:
    """The ways in which a step fails after all its tasks; each function raises."""

    @staticmethod
    def no_grad(pipe: Pipe) -> None:
        pipe.requires_grad_(False)
        step(pipe)

    @staticmethod
    def outputs(pipe: Pipe) -> None:
        pipe[2].register_forward_hook(lambda layer, args, y: (y, id(y)))
        step(pipe, loss_fn=lambda y, t: y[0].mean(), return_outputs=True)

    @staticmethod
    def hook(pipe: Pipe) -> None:
        def no(_: Tensor) -> None:
            raise ValueError("no")

        weight: Any = next(pipe.parameters())
        weight.register_hook(no)
        step(pipe)


@pytest.mark.parametrize("what", [Fails.no_grad, Fails.outputs, Fails.hook])
def test_a_step_that_fails_after_its_tasks_has_failed(what: Any) -> None:
    log = Log()
    with three() as pipe:
        pipe.add_observer(log)
        with pipe.record() as timeline, pytest.raises((RuntimeError, ValueError)):
            what(pipe)
        seen = pipe.statistics()
    assert log.of("run_finished")[0] == [RunInfo(0, M, N), "failed"]
    assert (seen.runs, seen.succeeded, seen.failures, seen.cancellations) == (1, 0, 1, 0)
    assert timeline.failed == {0}
    with pytest.raises(ValueError, match="no complete call in this timeline, and 1 that failed"):
        timeline.report()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_whose_last_task_failed_is_left_out_of_the_report(phase: str) -> None:
    """Although each of its tasks was recorded."""
    calls = []

    def no() -> None:
        calls.append(phase)
        if len(calls) == M:
            raise ValueError("no")

    def function(x: Tensor) -> Tensor:
        if phase == "forward":
            no()
        return acting(x, no) if phase == "backward" else x.exp()

    with pipe_of(nn.Linear(3, 3), Apply(function)) as pipe, pipe.record() as timeline:
        with pytest.raises(ValueError, match="no"):
            step(pipe, schedule="gpipe")
        step(pipe)
    assert (timeline.report().calls, timeline.report().incomplete) == (1, 1)


# Timelines ----------------------------------------------------------------------------------------


def record_step(pipe: Pipe, **options: Any) -> Timeline:
    with pipe.record() as timeline:
        step(pipe, **options)
    return timeline


def tasks(timeline: Timeline, kind: str) -> Counter[tuple[int, int]]:
    return Counter((e.micro_batch, e.partition) for e in timeline.events if e.kind == kind)


@modes
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
def test_each_task_is_recorded_once(checkpoint: str, recomputed: int, schedule: str) -> None:
    with three(checkpoint) as pipe:
        timeline = record_step(pipe, schedule=schedule)
    assert tasks(timeline, "forward") == tasks(timeline, "backward") == Counter(EACH)
    again = Counter((i, j) for i, j in EACH if i < recomputed)
    assert tasks(timeline, "recompute") == again
    assert tasks(timeline, "weight gradient") == Counter(EACH if schedule == "zb" else ())


def test_waits_for_inputs_and_for_gradients_are_recorded() -> None:
    with three("never") as pipe:
        waits = tasks(record_step(pipe), "wait")
    ahead = {(i, j) for i, j in EACH if j > 0}
    back = {(i, j) for i, j in EACH if j < N - 1}
    assert waits == Counter(ahead) + Counter(back)
