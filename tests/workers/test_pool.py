"""Tests P1, P2, P3 and P6 of the pool, mostly through a pipe. P4 and P5: test_exit, test_fork."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, PipeClosedError
from pipert.workers import pool as pool_module
from pipert.workers.pool import Pool
from pipert.workers.worker import WorkerThread
from tests.helpers.collection import settle
from tests.workers.jobs import Job

WAIT = 5.0  # s; what should happen at once is given up after it

CPU = torch.device("cpu")

ROWS = torch.arange(4.0).reshape(4, 1)


class Double(nn.Module):
    """A layer that doubles its input after a test's action, and notes its threads."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.before = before
        self.threads: list[threading.Thread] = []

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.current_thread())
        self.before()
        return x * 2


class Square(Double):
    """A layer that squares its input, which it saves unless it is recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


class Gate:
    """A layer's function that blocks until a test lets it continue."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(WAIT)


def two(first: nn.Module, second: nn.Module, chunks: int = 2) -> Pipe:
    return Pipe(nn.Sequential(first, second), [1, 1], devices=["cpu", "cpu"], chunks=chunks)


def started(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A thread that calls ``function``, and where it leaves what that returns or raises."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: B036  what is caught is what is tested
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def workers() -> set[WorkerThread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)}


def end(threads: set[WorkerThread], wait: float = WAIT) -> set[WorkerThread]:
    """Returns the threads that do not end within ``wait`` seconds."""
    settle()
    deadline = time.monotonic() + wait
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread for thread in threads if thread.is_alive()}


# P1


def test_the_first_run_starts_a_thread_for_each_partition_and_one_for_the_clock() -> None:
    before = workers()
    with two(Double(), Double()) as pipe:
        pipe(ROWS)
        assert len(workers() - before) == 3


def test_a_second_run_runs_on_the_threads_of_the_first() -> None:
    first, second = Double(), Double()
    with two(first, second) as pipe:
        pipe(ROWS)
        pipe(ROWS)
        assert [len(set(layer.threads)) for layer in (first, second)] == [1, 1]
        assert threading.current_thread() not in first.threads + second.threads


def test_simultaneous_first_callers_start_the_threads_once() -> None:
    before = workers()
    together = threading.Barrier(4)
    with two(Double(), Double()) as pipe:
        callers = [started(lambda: (together.wait(WAIT), pipe(ROWS))) for _ in range(4)]
        for thread, _ in callers:
            thread.join(WAIT)
        assert len(workers() - before) == 3


def test_only_a_dead_thread_is_replaced() -> None:
    pool = Pool(["pipert-test-0", "pipert-test-1"], [CPU, CPU])
    pool.start()
    old = list(pool._threads)
    old[0].stop()
    old[0].join(WAIT)
    pool.start()
    new = list(pool._threads)
    pool.close()
    assert (new[0] is old[0], new[1] is old[1]) == (False, True)


# P2


def test_close_joins_the_threads() -> None:
    before = workers()
    pipe = two(Double(), Double())
    pipe(ROWS)
    pipe.close()
    assert workers() == before


def test_each_of_several_closers_has_joined_when_it_returns() -> None:
    gate = Gate()
    pipe = two(Double(gate), Double(), chunks=1)
    caller, _ = started(lambda: pipe(ROWS))
    gate.reached.wait(WAIT)
    running = set(pipe._runtime.pool._threads)

    def close() -> set[WorkerThread]:
        pipe.close()
        return {thread for thread in running if thread.is_alive()}

    closers = [started(close) for _ in range(3)]
    gate.open.set()
    for thread, _ in closers:
        thread.join(WAIT)
    caller.join(WAIT)
    assert [outcome for _, outcome in closers] == [[set()]] * 3


def test_a_layer_may_close_its_pipe() -> None:
    before = workers()
    holder: list[Pipe] = []
    pipe = two(Double(lambda: holder[0].close()), Double(), chunks=4)
    holder.append(pipe)
    caller, outcome = started(lambda: pipe(ROWS))
    caller.join(WAIT)
    holder.clear()
    left = end(workers() - before)
    assert ([type(result) for result in outcome], left) == ([PipeClosedError], set())


@pytest.mark.parametrize("closes", [True, False], ids=["closed by a layer", "dropped before"])
def test_the_backward_works_though_its_pipe_has_ended(closes: bool, no_gc: None) -> None:
    holder: list[Pipe] = []
    first = Square(lambda: [pipe.close() for pipe in holder])
    pipe = two(first, Double())
    pipe.checkpoint = "always"
    x = torch.ones(4, 1, requires_grad=True)
    out = pipe(x)
    holder += [pipe] * closes
    del pipe
    out.sum().backward()
    holder.clear()
    assert threading.current_thread() in first.threads
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 1), 16.0))


@pytest.mark.main_thread
@pytest.mark.parametrize("at", [0, 1])
def test_a_signal_handler_that_closes_the_pool_while_it_starts_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The handler runs on the thread that is starting the threads, after it has started one."""
    before = workers()
    pool = Pool(["pipert-test-0", "pipert-test-1"], [CPU, CPU])

    class Signalling(WorkerThread):
        def start(self) -> None:
            super().start()
            if self.name == f"pipert-test-{at}":
                os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(pool_module, "WorkerThread", Signalling)
    old = signal.signal(signal.SIGUSR1, lambda number, frame: pool.close())
    try:
        pool.start()
    except PipeClosedError:
        pass
    finally:
        signal.signal(signal.SIGUSR1, old)
    left = end(workers() - before, 0.1)
    for thread in left:
        thread.stop()
    assert left == set()


# P3


def test_dropping_the_last_reference_ends_the_threads(no_gc: None) -> None:
    before = workers()
    pipe = two(Double(), Double())
    pipe(ROWS)
    new = workers() - before
    del pipe
    assert (len(new), end(new)) == (3, set())


def test_dropping_the_last_reference_does_not_join(no_gc: None) -> None:
    """A layer that is held up in a call of another thread, which has no reference to the pipe."""
    gate = Gate()
    pool = Pool(["pipert-test-0"], [CPU])
    pool.start()
    thread = pool._threads[0]

    class Owner:
        pass

    owner = Owner()
    weakref.finalize(owner, pool.stop)
    pool.put(0, Job(gate))
    gate.reached.wait(WAIT)
    del owner
    alive = thread.is_alive()
    gate.open.set()
    thread.join(WAIT)
    assert (alive, thread.is_alive()) == (True, False)


def test_the_last_reference_may_be_dropped_by_a_layer(no_gc: None) -> None:
    """The finalizer runs on a worker of another pipe."""
    before = workers()
    holder = [two(Double(), Double())]
    holder[0](ROWS)
    new = workers() - before
    with two(Double(holder.clear), Double()) as pipe:
        pipe(ROWS)
        assert (len(new), end(new)) == (3, set())


# P6


def test_threads_are_named_after_their_devices() -> None:
    first, second = Double(), Double()
    with two(first, second) as pipe:
        pipe(ROWS)
        names = [layer.threads[0].name for layer in (first, second)]
        assert names == ["pipert-cpu-0", "pipert-cpu-1"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_operating_system_knows_the_names() -> None:
    with two(Double(), Double()) as pipe:
        pipe(ROWS)
        names = {
            Path(f"/proc/self/task/{thread.native_id}/comm").read_text().strip()
            for thread in pipe._runtime.pool._threads
        }
        assert names == {"pipert-cpu-0", "pipert-cpu-1", "pipert-clock"}
