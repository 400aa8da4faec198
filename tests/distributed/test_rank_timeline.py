"""Tests what each rank records of its own tasks, and what it tells observers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Event, Observer, RunInfo, Statistics, TaskInfo, distributed
from tests.distributed.launcher import run

M = 4


def pipe_of(n: int, **settings: Any) -> distributed.Pipe:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(n)])
    settings.setdefault("chunks", M)
    return distributed.Pipe(layers, [1] * n, **settings)


def step(pipe: distributed.Pipe) -> Tensor:
    x = torch.ones(2 * M, 4)
    loss: Tensor = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return loss


def recorded(rank: int, n: int, settings: dict[str, Any]) -> list[Event]:
    pipe = pipe_of(n, **settings)
    with pipe.record() as timeline:
        with pytest.raises((RuntimeError, TypeError)):
            pipe.forward_backward(torch.ones(8, 4), target=None, loss_fn=refuse)
        step(pipe)
        pipe(torch.ones(2 * M, 4))
    return list(timeline.events)


def refuse(output: Tensor, target: None) -> Tensor:
    raise TypeError("no loss today")


@pytest.mark.parametrize(
    "n, schedule, checkpoint, recomputed",
    [(2, "1f1b", "never", 0), (2, "1f1b", "always", M), (4, "interleaved", "never", 0)],
)
def test_each_rank_records_its_own_tasks(
    n: int, schedule: str, checkpoint: str, recomputed: int
) -> None:
    settings = {"schedule": schedule, "checkpoint": checkpoint}
    for rank, events in enumerate(run(2, recorded, n, settings)):
        counts = Counter((event.kind, event.partition) for event in events if event.run)
        for j in range(n):
            is_here = j % 2 == rank
            assert counts["forward", j] == 2 * M * is_here
            assert counts["backward", j] == M * is_here
            assert counts["recomputation", j] == recomputed * is_here


class Notifier(Observer):
    def __init__(self) -> None:
        self.names: list[str] = []

    def run_started(self, run: RunInfo) -> None:
        self.names.append(f"run {run.number} of {run.micro_batches} x {run.partitions}")

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        self.names.append(outcome)

    def task_started(self, task: TaskInfo) -> None:
        self.names.append(f"{task.phase} {task.micro_batch},{task.partition}")

    def failed(self, task: TaskInfo, error: BaseException) -> None:
        self.names.append(f"failed {task.phase} {task.micro_batch},{task.partition}")


def observed(rank: int) -> tuple[list[str], Statistics]:
    pipe = pipe_of(2, checkpoint="except_last", chunks=2)
    told = Notifier()
    pipe.add_observer(told)
    step(pipe)
    with pytest.raises((RuntimeError, TypeError)):
        pipe.forward_backward(torch.ones(8, 4), target=None, loss_fn=refuse)
    pipe.remove_observer(told)
    pipe(torch.ones(8, 4))
    with pytest.raises(TypeError, match="pipert.Observer"):
        pipe.add_observer(print)  # type: ignore[arg-type]
    return told.names, pipe.statistics()


def test_observers_and_statistics_are_of_this_rank() -> None:
    found = run(2, observed)
    for rank, (names, statistics) in enumerate(found):
        own = [name for name in names if f",{rank}" in name]
        assert names[0] == "run 0 of 2 x 2" and names[-1] == "failed"
        begins = [name for name in names if name[0] in "fbr" and "," in name]
        assert own == begins and f"recomputation 0,{rank}" in own
        assert f"backward 1,{rank}" in own
        again = 1 + (rank == 0)  # which knows nothing of the failure when it goes back
        assert statistics == Statistics(3, 0, 2, 1, 0, again, ())
    assert "failed forward 0,1" in found[1][0] and "failed forward 0,1" not in found[0][0]
