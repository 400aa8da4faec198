"""Tasks of a step run on the workers, at the same time; how many micro-batches are kept is limited.

Each test here fails when one thread does all the work: a barrier breaks.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from tests.helpers.ways import linear, mean

PATIENCE = 10.0  # s

Task = tuple[str, int, int]


class Meeting:
    """Two tasks that wait for each other.

    Args:
        tasks: which; others pass.
    """

    def __init__(self, *tasks: Task) -> None:
        self.tasks = tasks
        self.threads: list[str] = []
        self._barrier = threading.Barrier(max(1, len(tasks)))

    def __call__(self, task: Task) -> None:
        if task in self.tasks:
            self.threads.append(threading.current_thread().name)
            self._barrier.wait(PATIENCE)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Meeting, i: int, j: int) -> Tensor:
        meeting(("R" if is_recomputing() else "F", i, j))
        ctx.args = meeting, i, j
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        meeting, i, j = ctx.args
        meeting(("B", i, j))
        return grad, None, None, None


class Watched(nn.Module):
    """A layer of partition ``j`` whose tasks join a meeting; rows begin with their micro-batch."""

    def __init__(self, meeting: Meeting, j: int) -> None:
        super().__init__()
        self.meeting, self.j = meeting, j
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        number, rest = x[:, :1].detach(), x[:, 1:]
        i, apply = int(number[0, 0]), _Watched.apply
        y = apply(rest * self.weight, self.meeting, i, self.j)  # type: ignore[no-untyped-call]
        return torch.cat([number, y], 1)


def meet(schedule: str, *tasks: Task, checkpoint: str = "never", n: int = 2) -> list[str]:
    """Takes a step of four micro-batches; returns the threads of two tasks that met."""
    meeting = Meeting(*tasks)
    rows = torch.arange(4, dtype=torch.float64).view(4, 1).expand(4, 3)
    module = nn.Sequential(*[Watched(meeting, j) for j in range(n)])
    options: dict[str, Any] = {"chunks": 4, "checkpoint": checkpoint}
    with Pipe(module, [1] * n, devices=["cpu"] * n, **options) as pipe:
        pipe.forward_backward(rows, loss_fn=mean, schedule=schedule)
    return sorted(meeting.threads)


BOTH = ["pipert-cpu-0", "pipert-cpu-1"]


@pytest.mark.parametrize(
    ("schedule", "one", "other"),
    [
        ("gpipe", ("B", 3, 0), ("B", 2, 1)),
        ("gpipe", ("B", 1, 0), ("B", 0, 1)),
        ("1f1b", ("B", 0, 0), ("B", 1, 1)),
        ("1f1b", ("B", 2, 0), ("B", 3, 1)),
    ],
)
def test_two_partitions_go_backward_at_the_same_time(schedule: str, one: Task, other: Task) -> None:
    assert meet(schedule, one, other) == BOTH


@pytest.mark.layered  # names threads, not those of micro-batches
def test_one_partition_goes_forward_while_another_goes_backward() -> None:
    assert meet("1f1b", ("F", 2, 0), ("B", 1, 1)) == BOTH


@pytest.mark.parametrize(
    ("schedule", "one", "other"),
    [("gpipe", ("R", 2, 0), ("R", 1, 1)), ("1f1b", ("R", 0, 0), ("R", 0, 1))],
)
def test_two_partitions_recompute_at_the_same_time(schedule: str, one: Task, other: Task) -> None:
    assert meet(schedule, one, other, checkpoint="always") == BOTH


@pytest.mark.layered  # names threads, not those of micro-batches
def test_the_loss_is_computed_on_the_last_worker() -> None:
    threads = []

    def loss(y: Tensor, target: Any) -> Tensor:
        threads.append(threading.current_thread().name)
        return y.mean()

    module = nn.Sequential(linear(3, 3), linear(3, 3), linear(3, 3))
    with Pipe(module, [1, 1, 1], devices=["cpu"] * 3, chunks=2) as pipe:
        pipe.forward_backward(torch.randn(4, 3, dtype=torch.float64), loss_fn=loss)
    assert threads == ["pipert-cpu-2"] * 2
