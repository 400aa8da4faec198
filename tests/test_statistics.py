"""``Pipe.statistics()``: what it counts, and that any thread may ask at any moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, Statistics, TaskStatus
from tests.layers import Apply

X = torch.arange(8.0).reshape(8, 1)
WAIT = 10.0  # s


def pipe_of(*layers: nn.Module, **options: Any) -> Pipe:
    n = len(layers)
    return Pipe(nn.Sequential(*layers), [1] * n, devices=["cpu"] * n, **options)


def linear() -> nn.Linear:
    return nn.Linear(1, 1)


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
    with pipe_of(Apply(gate), linear(), chunks=2) as pipe:
        thread = threading.Thread(target=pipe, args=(X,))
        thread.start()
        assert gate.entered.wait(WAIT)
        seen = pipe.statistics()
        later = pipe.statistics()
        gate.open.set()
        thread.join(WAIT)
    assert seen.in_flight == 1
    first = seen.workers[0].doing
    assert first is not None and first == TaskStatus(0, "forward", 0, 0, first.seconds)
    second = seen.workers[1].doing
    assert second is None or second.phase == "waiting for input" and second.partition == 1
    assert later.workers[0].busy_seconds > seen.workers[0].busy_seconds > 0
    assert later.workers[1].busy_seconds == 0


def test_tasks_that_wait_are_counted() -> None:
    gate = Gate()
    with pipe_of(Apply(gate), chunks=4) as pipe:
        threads = [threading.Thread(target=pipe, args=(X,)) for _ in range(2)]
        threads[0].start()
        assert gate.entered.wait(WAIT)
        threads[1].start()
        # The second caller's tasks are posted by the clock: its queue is seen to grow.
        reached = threading.Event()
        poll = threading.Thread(target=lambda: _until(pipe, 7, reached))
        poll.start()
        assert reached.wait(WAIT)
        gate.open.set()
        for thread in (*threads, poll):
            thread.join(WAIT)
        assert pipe.statistics().workers[0].queue_depth == 0


def _until(pipe: Pipe, depth: int, reached: threading.Event) -> None:
    for _ in range(10**6):
        if pipe.statistics().workers[0].queue_depth == depth:
            reached.set()
            return


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

    with pipe_of(linear(), linear(), chunks=4) as pipe:
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
    assert (last.runs, last.succeeded, last.tasks) == (12, 12, 96)
    for before, after in zip(seen, seen[1:], strict=False):
        assert before.runs <= after.runs and before.tasks <= after.tasks
        assert 0 <= after.in_flight <= 3 and after.succeeded >= before.succeeded
        for one, other in zip(before.workers, after.workers, strict=True):
            assert one.busy_seconds <= other.busy_seconds
