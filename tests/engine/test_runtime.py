"""Runs of a pipe: what overlaps, the guarantees R1 to R6, several callers, pipes inside of pipes.

That any failure anywhere is raised as it is and leaves nothing behind, ``tests/contract`` has.

Order is forced with events and barriers: a layer waits for something that another thread has to do
meanwhile. With one thread in place of the workers nobody would do it, and the wait would run into
its timeout. The rows of a mini-batch are 0, 1, 2, ... and each micro-batch is one row, so that a
layer knows which task ``F[i,j]`` it is in.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pipert import Pipe, PipertError, is_recomputing
from pipert.stage.run import Outcome
from tests.helpers.activations import Activations
from tests.helpers.caller_threads import Caller
from tests.helpers.noted_failures import Failures

TIMEOUT = 3.0  # s; how long anything here waits before it is taken for a hang

Task = tuple[int, int]


def wait(event: threading.Event) -> None:
    assert event.wait(TIMEOUT), "what this layer waits for never happened"


class Stage(nn.Module):
    """The layer of partition ``j``; calls ``act(i, j)`` in ``F[i,j]``."""

    def __init__(self, j: int, act: Callable[[int, int], None]) -> None:
        super().__init__()
        self.j = j
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(int(x[0, 0].detach().item()), self.j)
        return x.clone()


def pipe_of(n: int, act: Callable[[int, int], None], chunks: int) -> Pipe:
    """Makes a pipe of ``n`` partitions with one :class:`Stage` each."""
    layers = [Stage(j, act) for j in range(n)]
    return Pipe(nn.Sequential(*layers), balance=[1] * n, devices=["cpu"] * n, chunks=chunks)


def rows(m: int, first: int = 0) -> Tensor:
    """Makes a mini-batch of ``m`` rows that hold their own numbers."""
    return torch.arange(first, first + m, dtype=torch.float32).unsqueeze(1)


class Events(dict[Task, threading.Event]):
    """An event for each task, made when it is first asked for."""

    _lock = threading.Lock()

    def __missing__(self, task: Task) -> threading.Event:
        with self._lock:
            return self.setdefault(task, threading.Event())


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    return Failures(monkeypatch)


class Interrupt(BaseException):
    """The exception of these tests' signal handler, in place of KeyboardInterrupt."""


class Signal:
    """Interrupts the main thread, where the tests run."""

    def __init__(self) -> None:
        self._due = False
        self._handled = threading.Event()

    def handle(self, *_: object) -> None:
        if self._due:
            self._due = False
            self._handled.set()
            raise Interrupt

    def send(self) -> None:
        """From a worker: interrupt the caller and wait until it has noticed.

        CPython misses a signal that comes just before it blocks, until the next one.
        """
        main = threading.main_thread().ident
        assert main is not None
        self._handled.clear()
        self._due = True
        for _ in range(60):
            signal.pthread_kill(main, signal.SIGUSR1)
            if self._handled.wait(TIMEOUT / 60):
                return
        raise AssertionError("the caller was not interrupted")

    def send_to_myself(self) -> None:
        """From the main thread."""
        self._due = True
        signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def interrupt() -> Iterator[Signal]:
    sender = Signal()
    old = signal.signal(signal.SIGUSR1, sender.handle)
    yield sender
    signal.signal(signal.SIGUSR1, old)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Makes a first call, whose many imports no test should pay for."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    torch_checkpoint(torch.neg, torch.ones(1), use_reentrant=False)


# What overlaps ------------------------------------------------------------------------------------


def test_all_partitions_compute_at_once_when_the_pipeline_is_full() -> None:
    full = threading.Barrier(4)

    def act(i: int, j: int) -> None:
        if i + j == 3:
            full.wait(TIMEOUT)

    with pipe_of(4, act, chunks=4) as pipe:
        assert torch.equal(pipe(rows(4)), rows(4))


@pytest.mark.parametrize(
    ("n", "m", "late", "awaited"),
    [
        (2, 4, (0, 1), [(1, 0), (2, 0), (3, 0)]),  # a fast partition runs ahead
        (4, 2, (1, 0), [(0, 3)]),  # though an earlier diagonal is not done
        (3, 3, (2, 0), [(1, 2)]),  # a slow micro-batch holds up nobody before it (pitfall 32)
    ],
)
def test_a_task_starts_when_its_input_is_there(
    n: int, m: int, late: Task, awaited: list[Task]
) -> None:
    done = Events()

    def act(i: int, j: int) -> None:
        if (i, j) == late:
            for task in awaited:
                wait(done[task])
        done[i, j].set()

    with pipe_of(n, act, chunks=m) as pipe:
        assert torch.equal(pipe(rows(m)), rows(m))


# R2: when a call is over, none of its tasks is ----------------------------------------------------


def test_a_call_that_raises_has_waited_for_the_tasks_that_were_executing(
    failures: Failures,
) -> None:
    started = threading.Event()
    finished = []

    def act(i: int, j: int) -> None:
        if (i, j) == (0, 1):
            wait(started)
            raise ValueError
        if (i, j) == (2, 0):
            started.set()
            failures.wait()
            torch.randn(300, 300) @ torch.randn(300, 300)
            finished.append(True)

    with pipe_of(2, act, chunks=3) as pipe:
        with pytest.raises(ValueError):
            pipe(rows(3))
        assert finished


@pytest.mark.main_thread
def test_a_call_that_is_interrupted_has_waited_for_the_tasks_that_were_executing(
    interrupt: Signal,
) -> None:
    finished = []

    def act(i: int, j: int) -> None:
        if (i, j) == (1, 1):
            interrupt.send()
            torch.randn(300, 300) @ torch.randn(300, 300)
            finished.append(True)

    with pipe_of(2, act, chunks=3) as pipe:
        with pytest.raises(Interrupt):
            pipe(rows(3))
        assert finished


# R3: which error, and what it says ----------------------------------------------------------------


class StageError(Exception):
    """An error that says which task raised it."""


def test_pitfall_12_the_note_says_which_task_failed_where_and_on_what() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] >= 2:
                raise StageError
            return x

    model = nn.Sequential()
    model.add_module("lift", nn.Identity())
    model.add_module("judge", Picky())
    with Pipe(model, balance=[1, 1], devices=["cpu"] * 2, chunks=4) as pipe:
        with pytest.raises(StageError) as info:
            pipe(rows(4).expand(4, 7))
    assert info.value.__notes__ == [
        "in forward F[2,1]: partition 1 on cpu, layer 'judge' "
        f"({Picky.__qualname__}), micro-batch 2 of 4, input float32[1, 7]"
    ]


# R4: nothing later starts -------------------------------------------------------------------------


def test_after_a_failure_no_later_task_of_another_partition_starts(failures: Failures) -> None:
    executing = threading.Event()
    started: list[Task] = []

    def act(i: int, j: int) -> None:
        started.append((i, j))
        if (i, j) == (0, 1):
            wait(executing)
            raise ValueError
        if (i, j) == (2, 0):
            executing.set()
            failures.wait()

    with pipe_of(2, act, chunks=6) as pipe, pytest.raises(ValueError):
        pipe(rows(6))
    assert sorted(started) == [(0, 0), (0, 1), (1, 0), (2, 0)]


@pytest.mark.main_thread
def test_no_task_starts_after_an_interrupt(
    interrupt: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Task] = []
    cancelled = threading.Event()
    cancel = Outcome.cancel

    def cancel_and_tell(outcome: Outcome) -> None:
        cancel(outcome)
        cancelled.set()

    def act(i: int, j: int) -> None:
        started.append((i, j))
        interrupt.send()
        wait(cancelled)

    monkeypatch.setattr(Outcome, "cancel", cancel_and_tell)
    with pipe_of(2, act, chunks=4) as pipe, pytest.raises(Interrupt):
        pipe(rows(4))
    assert started == [(0, 0)]


# R5: nothing of a failed run is left --------------------------------------------------------------


def test_when_several_tasks_failed_no_activation_is_left(failures: Failures, no_gc: None) -> None:
    activations = Activations()

    def act(i: int, j: int) -> None:
        activations.add(torch.ones(1))
        kept = activations.add(torch.ones(3))  # in the frames of the traceback
        if (i, j) == (1, 0):
            failures.wait()
        if (i, j) in {(1, 0), (0, 1)}:
            raise MemoryError(len(kept))

    with pipe_of(2, act, chunks=2) as pipe:
        with contextlib.suppress(MemoryError):
            pipe(rows(2))
        assert activations.left() == 0


# Several callers ----------------------------------------------------------------------------------


def test_runs_of_two_callers_overlap_in_the_pipeline_and_keep_their_own_grad_mode() -> None:
    class Scale(Stage):
        def __init__(self, j: int, act: Callable[[int, int], None]) -> None:
            super().__init__(j, act)
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight

    a_is_in_1 = threading.Event()
    both = threading.Barrier(2)

    def act(i: int, j: int) -> None:
        if (i, j) == (0, 1):
            a_is_in_1.set()
        if (i, j) in {(0, 1), (10, 0)}:
            both.wait(TIMEOUT)

    model = nn.Sequential(Scale(0, act), Scale(1, act))
    with Pipe(model, balance=[1, 1], devices=["cpu"] * 2, checkpoint="never") as pipe:
        a = Caller(torch.no_grad()(lambda: pipe(rows(1))))
        wait(a_is_in_1)
        b = Caller(lambda: pipe(rows(1, first=10)))
        assert (a.result().requires_grad, b.result().requires_grad) == (False, True)
        assert torch.equal(a.result(), rows(1)) and torch.equal(b.result(), rows(1, first=10))


# Order of calls, pipes in pipes -------------------------------------------------------------------


class InOrder(nn.Module):
    """Lets F[0,1] go before F[1,0] the first time, and after it when it is done ``again``.

    The sign of the last column says which of two micro-batches it is.
    """

    def __init__(self, j: int, done: Events, again: Callable[[], bool]) -> None:
        super().__init__()
        self.j = j
        self.weight = nn.Parameter(torch.tensor([0.5 + 0.2 * j, -0.5]))
        self._done = done
        self._again = again

    def forward(self, x: Tensor) -> Tensor:
        i = 0 if x[0, -1] > 0 else 1
        again = self._again()
        if (i, self.j) == ((0, 1) if again else (1, 0)):
            wait(self._done[again, 1 - self.j])
        y = self.compute(x)
        if (i, self.j) == ((1, 0) if again else (0, 1)):
            self._done[again, self.j].set()
        return y

    def compute(self, x: Tensor) -> Tensor:
        return (x * self.weight).sinh() * torch.tensor([1.0, -1.0])


def test_gradients_through_a_pipe_in_a_pipe_do_not_depend_on_the_timing_of_the_inner_one() -> None:
    done = Events()
    first, second = [InOrder(j, done, is_recomputing) for j in range(2)]
    parameters = [first.weight, second.weight]
    x = torch.tensor([[0.3, 0.4], [0.5, -0.6]])
    y = second.compute(first.compute(x))
    expected = torch.autograd.grad(y.pow(2).sum(), parameters)
    layers = nn.Sequential(first, second)
    inner = Pipe(layers, balance=[1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    outer = Pipe(nn.Sequential(inner), balance=[1], devices=["cpu"], checkpoint="always")
    with inner, outer:
        grads = torch.autograd.grad(outer(x).pow(2).sum(), parameters)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_a_pipe_inside_of_torch_s_checkpoint_is_right_or_refused_by_name(mode: str) -> None:
    """Whose saved-tensor hooks count on an order that several workers do not keep."""
    done = Events()
    in_backward = threading.Event()
    first, second = [InOrder(j, done, in_backward.is_set) for j in range(2)]
    parameters = [first.weight, second.weight]
    x = torch.tensor([[0.3, 0.4], [0.5, -0.6]])
    y = second.compute(first.compute(x))
    expected = torch.autograd.grad(y.pow(2).sum(), parameters)
    layers = nn.Sequential(first, second)
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode) as pipe:
        try:
            loss = torch_checkpoint(pipe, x, use_reentrant=False).pow(2).sum()
            in_backward.set()
            grads = torch.autograd.grad(loss, parameters)
        except PipertError:
            return
    torch.testing.assert_close(grads, expected)
