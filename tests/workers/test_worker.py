"""W1 to W4 of a worker: an outcome for each task, no memory of the last, no way back to the pool.

Exceptions are thrown into workers from outside with ``PyThreadState_SetAsyncExc``. They are
``SystemExit``, which ``threading`` lets end a thread without a word.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, PipeClosedError, WorkerDiedError
from pipert.workers.pool import Pool
from pipert.workers.worker import Activity, WorkerThread
from tests.helpers.activations import until
from tests.workers.jobs import Job

WAIT = 5.0  # s; what should happen at once is given up after it

CPU = torch.device("cpu")

kills = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""The test ends a thread by an exception."""


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    thread = WorkerThread("pipert-test", CPU, Activity())
    thread.start()
    yield thread
    thread.stop()
    thread.join(WAIT)


def throw(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Makes ``thread`` raise ``kind`` when it next executes Python."""
    assert thread.ident is not None
    thrown = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(kind)
    )
    assert thrown == 1


def until_blocked(thread: threading.Thread) -> None:
    """Waits until ``thread`` is blocked: it sleeps, and does not move for a while."""
    assert thread.ident is not None
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    seen: list[object] = []
    while len(seen) < 10:
        time.sleep(1e-3)  # the others may have the interpreter meanwhile
        frame = sys._current_frames()[thread.ident]
        place = (frame.f_code, frame.f_lasti)
        asleep = not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "S"
        seen = [*seen, place] if asleep and (not seen or seen[-1] == place) else []


def call(function: Callable[[], object]) -> object:
    """Returns or raises the outcome of ``function``; fails, rather than hangs, if it has none."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: B036  what is caught is what is tested
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert outcome, "the call hangs"
    return outcome[0]


class Double(nn.Module):
    """A layer that doubles its input after a test's action."""

    def __init__(self, before: Callable[[Tensor], object] = lambda x: None) -> None:
        super().__init__()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        return x * 2


def two(first: nn.Module, second: nn.Module, chunks: int = 2, checkpoint: str = "never") -> Pipe:
    return Pipe(
        nn.Sequential(first, second),
        [1, 1],
        devices=["cpu", "cpu"],
        chunks=chunks,
        checkpoint=checkpoint,
    )


ROWS = torch.arange(4.0).reshape(4, 1)


# W1, of a worker alone


def test_stop_lets_the_current_task_finish(worker: WorkerThread) -> None:
    running, go_on = threading.Event(), threading.Event()
    job = Job(lambda: (running.set(), go_on.wait(WAIT)))
    worker.in_queue.put(job)
    running.wait(WAIT)
    worker.stop()
    go_on.set()
    worker.join(WAIT)
    assert job.outcomes == ["run"]


ENDS = [
    (WorkerThread.stop, PipeClosedError),
    pytest.param(lambda worker: throw(worker, SystemExit), WorkerDiedError, marks=kills),
]


@pytest.mark.parametrize(("end", "error"), ENDS, ids=["stop", "an exception from outside"])
def test_the_end_of_a_worker_abandons_the_tasks_that_wait(
    worker: WorkerThread, end: Callable[[WorkerThread], object], error: type[Exception]
) -> None:
    running, go_on = threading.Event(), threading.Event()
    worker.in_queue.put(Job(lambda: (running.set(), go_on.wait(WAIT))))
    running.wait(WAIT)
    jobs = [Job(), Job()]
    for job in jobs:
        worker.in_queue.put(job)
    end(worker)
    go_on.set()
    worker.join(WAIT)
    assert [job.outcomes for job in jobs] == [[error], [error]]


@pytest.mark.slow
def test_workers_end_one_after_another_with_what_their_threads_hold() -> None:
    """Objects that ``torch.compile`` leaves in two threads must not be freed at once (W4)."""
    events: list[str] = []

    class Left:
        def __del__(self) -> None:
            events.append("begins")
            time.sleep(0.1)  # in which the next one would begin, too
            events.append("ends")

    held = threading.local()
    workers = [WorkerThread("pipert-test", CPU, Activity()) for _ in range(3)]
    for worker in workers:
        job = Job(lambda: setattr(held, "left", Left()))
        worker.start()
        worker.in_queue.put(job)
        assert job.settled.wait(WAIT)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(WAIT)
    assert events == 3 * ["begins", "ends"]


@kills
def test_an_exception_from_outside_abandons_the_task_that_wakes_the_worker(
    worker: WorkerThread,
) -> None:
    until_blocked(worker)
    throw(worker, SystemExit)
    job = Job()
    worker.in_queue.put(job)
    worker.join(WAIT)
    assert job.outcomes == [WorkerDiedError]


@kills
def test_a_worker_ended_from_outside_logs_its_abandoned_tasks(
    worker: WorkerThread,
) -> None:
    with TestCase().assertLogs("pipert") as logged:
        worker.in_queue.put(Job(lambda: (throw(worker, SystemExit), [None for _ in range(100)])))
        worker.join(WAIT)
    (record,) = logged.records
    assert record.getMessage().startswith("pipert-test ended with 1 tasks to do: Traceback")
    assert "SystemExit" in record.getMessage() and record.exc_info is None


# W1, of a pipe


WORKERS = pytest.mark.parametrize("worker", [0, 1, 2], ids=["first", "last", "clock"])


@WORKERS
@kills
def test_the_caller_learns_that_a_worker_was_ended_from_outside_and_the_next_call_works(
    worker: int,
) -> None:
    pipe = two(Double(), Double())
    pipe(ROWS)
    thread = pipe._runtime.pool._threads[worker]
    until_blocked(thread)
    throw(thread, SystemExit)
    assert type(call(lambda: pipe(ROWS))) is WorkerDiedError
    thread.join(WAIT)
    outcome = call(lambda: pipe(ROWS))
    assert isinstance(outcome, Tensor) and torch.equal(outcome, ROWS * 4)
    pipe.close()


@kills
def test_an_exception_thrown_into_a_worker_that_waits_for_its_input_reaches_the_caller() -> None:
    running, go_on = threading.Event(), threading.Event()
    pipe = two(Double(lambda x: (running.set(), go_on.wait(WAIT))), Double(), chunks=1)
    pipe._runtime.pool.start()
    last = pipe._runtime.pool._threads[1]

    def interfere() -> None:
        running.wait(WAIT)
        until_blocked(last)
        throw(last, SystemExit)
        go_on.set()

    thread = threading.Thread(target=interfere, daemon=True)
    thread.start()
    outcome = call(lambda: pipe(ROWS))
    thread.join(WAIT)
    assert type(outcome) is SystemExit
    pipe.close()


# W2


def test_an_idle_worker_does_not_reference_its_last_task(worker: WorkerThread, no_gc: None) -> None:
    job = Job()
    reference, settled = weakref.ref(job), job.settled
    worker.in_queue.put(job)
    del job
    settled.wait(WAIT)
    assert until(lambda: reference() is None)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_idle_workers_reference_no_value_of_their_last_task(no_gc: None, checkpoint: str) -> None:
    references: list[weakref.ref[Any]] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            references.extend([weakref.ref(x), weakref.ref(y)])
            return y

    with two(Noting(), Noting(), checkpoint=checkpoint) as pipe:
        out = pipe(ROWS.clone().requires_grad_())
        del out
        assert until(lambda: all(reference() is None for reference in references))
        assert len(references) == 8


# W3


def test_a_worker_does_not_reference_its_pool(no_gc: None) -> None:
    pool = Pool(["pipert-test-0", "pipert-test-1"], [CPU, CPU])
    pool.start()
    threads = list(pool._threads)
    reference = weakref.ref(pool)
    del pool
    alive = [thread.is_alive() for thread in threads]
    for thread in threads:
        thread.stop()
    assert (reference(), alive) == (None, [True, True])


def test_a_worker_does_not_reference_its_pipe(no_gc: None) -> None:
    pipe = two(Double(), Double())
    pipe(ROWS)
    reference = weakref.ref(pipe)
    del pipe
    assert reference() is None
