"""Tests a layer that never returns beside other callers, signals, other pipes, and at exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from unittest import TestCase

import pytest
import torch
from torch import nn

from pipert import (
    Pipe,
    PipeClosedError,
    PipelineTimeout,
    WorkerBusyError,
)
from pipert.engine import waiting
from tests.activations import until
from tests.callers import Caller
from tests.faults.everywhere import strides, sweep
from tests.faults.stuck import SHORT, WAIT, WHERES, Stuck, until_back
from tests.test_exit import PRELUDE, run

# Other callers ------------------------------------------------------------------------------------


def in_flight(pipe: Pipe, count: int) -> None:
    assert until(lambda: pipe.statistics().in_flight == count), pipe.statistics()


def test_a_call_without_a_timeout_that_was_in_flight_gets_its_rows() -> None:
    with Stuck() as stuck:
        patient = Caller(lambda: stuck.pipe(stuck.x))
        assert stuck.layer.entered.wait(WAIT)
        with pytest.raises(PipelineTimeout):
            stuck.pipe(stuck.x, timeout=SHORT)  # behind it
        stuck.let_go()
        assert torch.allclose(patient.result(), stuck.plain(stuck.x))
        assert stuck.is_right()


@pytest.mark.slow
def test_a_call_that_was_queued_behind_one_that_is_given_up_gets_its_rows() -> None:
    with Stuck() as stuck:
        hasty = Caller(lambda: stuck.pipe(stuck.x, timeout=0.5))
        assert stuck.layer.entered.wait(WAIT)
        patient = Caller(lambda: stuck.pipe(stuck.x))
        in_flight(stuck.pipe, 2)
        with pytest.raises(PipelineTimeout):
            hasty.result()
        stuck.let_go()
        assert torch.allclose(patient.result(), stuck.plain(stuck.x))


@pytest.mark.slow
def test_each_of_two_calls_is_given_up_by_its_own_timeout() -> None:
    with Stuck() as stuck:
        calls = [Caller(lambda: stuck.pipe(stuck.x, timeout=0.5)) for _ in range(2)]
        assert stuck.layer.entered.wait(WAIT)
        for call in calls:
            with pytest.raises((PipelineTimeout, WorkerBusyError)):
                call.result()
        assert stuck.is_right()


def test_a_later_call_names_the_stuck_task_of_an_earlier_one() -> None:
    """The table shows the worker's current task, whichever call it belongs to."""
    with Stuck(i=1, j=0) as stuck:
        patient = Caller(lambda: stuck.pipe(stuck.x))
        assert stuck.layer.entered.wait(WAIT)
        with pytest.raises(PipelineTimeout, match="in never_returns") as info:
            stuck.pipe(stuck.x, timeout=SHORT)
        doing = info.value.workers[0].doing
        assert doing is not None and (doing.run, doing.micro_batch) == (0, 1)
        stuck.let_go()
        patient.result()


def test_a_call_that_was_given_up_while_it_was_queued_is_no_reason_to_refuse_others() -> None:
    with Stuck() as stuck:
        patient = Caller(lambda: stuck.pipe(stuck.x))
        assert stuck.layer.entered.wait(WAIT)
        with pytest.raises(PipelineTimeout):
            stuck.pipe(stuck.x, timeout=SHORT)
        another = Caller(lambda: stuck.pipe(stuck.x))
        stuck.let_go()
        patient.result()
        another.result()


def test_infinity_lifts_the_limit_of_the_pipe_for_a_call() -> None:
    with Stuck(timeout=SHORT) as stuck:
        patient = Caller(lambda: stuck.pipe(stuck.x, timeout=float("inf")))
        assert stuck.layer.entered.wait(WAIT)
        with pytest.raises(PipelineTimeout):
            stuck.pipe(stuck.x)
        stuck.let_go()
        patient.result()


# Interrupts ---------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """The exception of these tests' signal handler, in place of KeyboardInterrupt."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread, once; called by another thread."""
    due: list[bool] = []
    handled = threading.Event()

    def handle(*_: object) -> None:
        if due:
            due.clear()
            handled.set()
            raise Interrupt

    def send() -> None:
        main = threading.main_thread().ident or 0
        due.append(True)
        for _ in range(200):  # CPython misses one that comes just before it blocks
            signal.pthread_kill(main, signal.SIGUSR1)
            if handled.wait(0.05):
                return

    old = signal.signal(signal.SIGUSR1, handle)
    yield send
    signal.signal(signal.SIGUSR1, old)


@pytest.mark.slow
def test_an_interrupt_while_a_stuck_layer_is_waited_for_is_raised(
    interrupt: Callable[[], None],
) -> None:
    with Stuck() as stuck:
        sender = Caller(lambda: stuck.layer.entered.wait(WAIT) and interrupt())
        with pytest.raises(Interrupt):
            stuck.pipe(stuck.x, timeout=0.5)
        sender.result()
        with pytest.raises(WorkerBusyError, match="pipert-cpu-1"):
            stuck.pipe(stuck.x)
        assert stuck.is_right()


def test_a_call_that_returns_late_after_an_interrupt_leaves_the_pipe_usable(
    interrupt: Callable[[], None],
) -> None:
    """The worker is waited for once more, for the same time."""
    with Stuck() as stuck:

        def interrupt_and_let_go() -> None:
            assert stuck.layer.entered.wait(WAIT)
            interrupt()
            stuck.let_go()

        sender = Caller(interrupt_and_let_go)
        with pytest.raises(Interrupt):
            stuck.pipe(stuck.x, timeout=WAIT)
        sender.result()
        assert torch.allclose(stuck.pipe(stuck.x), stuck.plain(stuck.x))  # not even once refused


# Closing ------------------------------------------------------------------------------------------


def test_close_gives_up_after_its_timeout_and_names_the_worker() -> None:
    with Stuck() as stuck:
        stuck.times_out()
        with pytest.raises(PipelineTimeout, match="pipert-cpu-1") as info:
            stuck.pipe.close(timeout=SHORT)
        assert "in never_returns" in str(info.value)


def test_close_gives_up_after_the_timeout_of_the_pipe() -> None:
    with Stuck(timeout=SHORT) as stuck:
        stuck.times_out(lambda: stuck.pipe(stuck.x))
        with pytest.raises(PipelineTimeout):
            stuck.pipe.close()


def test_a_pipe_whose_close_was_given_up_is_closed() -> None:
    with Stuck() as stuck:
        stuck.times_out()
        with pytest.raises(PipelineTimeout):
            stuck.pipe.close(timeout=SHORT)
        with pytest.raises(PipeClosedError):
            stuck.pipe(stuck.x)


def test_close_can_be_repeated_when_the_layer_has_returned() -> None:
    with Stuck() as stuck:
        stuck.times_out()
        with pytest.raises(PipelineTimeout):
            stuck.pipe.close(timeout=SHORT)
        stuck.let_go()
        stuck.pipe.close(timeout=WAIT)
        assert not any(thread.is_alive() for thread in stuck.pipe._runtime.pool._threads)


@pytest.mark.parametrize("where", WHERES)
def test_closing_a_stuck_pipe_ends_the_run_of_another_thread_when_the_layer_returns(
    where: str,
) -> None:
    with Stuck(where=where) as stuck:
        call = Caller(stuck.run, WAIT)
        assert stuck.layer.entered.wait(WAIT)
        with pytest.raises(PipelineTimeout):
            stuck.pipe.close(timeout=SHORT)
        stuck.let_go()
        with pytest.raises(PipeClosedError, match="the pipe was closed during the call"):
            call.result()
        assert {p.grad for p in stuck.plain.parameters()} == {None}


@pytest.mark.slow
def test_a_call_that_sees_its_workers_end_one_after_the_other_says_that_the_pipe_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Idle workers end at once, and none of them was ended from outside."""
    monkeypatch.setattr(waiting, "_CHECK", 0.02)  # how often a caller looks after its workers
    with Stuck() as stuck:
        call = Caller(lambda: stuck.pipe(stuck.x))
        assert stuck.layer.entered.wait(WAIT)
        with pytest.raises(PipelineTimeout):
            stuck.pipe.close(timeout=0.3)
        stuck.let_go()
        with pytest.raises(PipeClosedError):
            call.result()


def test_the_end_of_a_with_statement_does_not_replace_what_is_being_raised() -> None:
    with Stuck(timeout=SHORT) as stuck, TestCase().assertLogs("pipert") as logged:
        with pytest.raises(LookupError), stuck.pipe:
            stuck.times_out(lambda: stuck.pipe(stuck.x))
            raise LookupError
        assert "pipert-cpu-1" in "".join(logged.output)


def test_the_end_of_a_with_statement_says_that_a_layer_does_not_return() -> None:
    with Stuck(timeout=SHORT) as stuck, pytest.raises(PipelineTimeout, match="in never_returns"):
        with stuck.pipe:
            stuck.times_out(lambda: stuck.pipe(stuck.x))


def test_the_last_reference_to_a_stuck_pipe_may_be_dropped() -> None:
    stuck = Stuck()
    stuck.times_out()
    threads = list(stuck.pipe._runtime.pool._threads)
    del stuck.pipe
    stuck.let_go()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)


# Pipes in pipes -----------------------------------------------------------------------------------


def nested(of_outer: str = "never") -> tuple[Stuck, Pipe]:
    inner = Stuck(i=0, j=0, m=1)
    # The last layer saves something, or there would be nothing to recompute.
    layers = nn.Sequential(nn.Identity(), inner.pipe, nn.Tanh())
    return inner, Pipe(layers, [1, 2], devices=["cpu"] * 2, chunks=1, checkpoint=of_outer)


def test_a_timeout_of_an_inner_pipe_is_raised_with_a_note_of_the_outer_one() -> None:
    inner, outer = nested()
    inner.pipe.timeout = SHORT
    with inner, outer:
        error = inner.times_out(lambda: outer(inner.x))
        assert error.__notes__[-1].startswith("in forward F[0,1]: partition 1 on cpu, layer '1'")
        y = inner.until_back(lambda: outer(inner.x))
        assert torch.allclose(y, inner.plain(inner.x).tanh())


@pytest.mark.slow
def test_a_timeout_of_an_outer_pipe_shows_where_the_inner_one_was_called() -> None:
    inner, outer = nested()
    with inner, outer:
        with pytest.raises(PipelineTimeout) as info:
            outer(inner.x, timeout=0.5)
        doing = info.value.workers[1].doing
        assert doing is not None and doing.phase == "forward"
        inner.let_go()
        right = inner.plain(inner.x)
        assert torch.allclose(until_back(lambda: outer(inner.x)), right.tanh())
        assert torch.allclose(inner.pipe(inner.x), right)


def test_a_timeout_of_an_inner_pipe_in_a_recomputation_is_raised_with_a_note() -> None:
    inner, outer = nested("always")
    inner.layer.phase = "recomputation"
    with inner, outer:
        loss = outer(inner.x)[:, 1:].sum()
        inner.pipe.timeout = 0.2
        with pytest.raises(PipelineTimeout) as info:
            loss.backward()
        assert info.value.__notes__[-1].startswith("in recomputation R[0,1]: partition 1 on cpu")
        inner.let_go()
        inner.pipe.timeout = None
        until_back(lambda: outer(inner.x)[:, 1:].sum().backward())
        expected = torch.autograd.grad(
            inner.plain(inner.x).tanh()[:, 1:].sum(), list(inner.plain.parameters())
        )
        for parameter, grad in zip(inner.plain.parameters(), expected, strict=True):
            assert parameter.grad is not None and torch.allclose(parameter.grad, grad)


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_not_refused_because_of_a_worker_of_its_parent() -> None:
    with Stuck() as stuck:
        stuck.times_out()
        pid = os.fork()
        if pid == 0:
            code = 41
            with contextlib.suppress(BaseException):
                signal.alarm(10)
                stuck.let_go()  # the child's own event
                with torch.no_grad():
                    code = 40 if torch.allclose(stuck.pipe(stuck.x), stuck.plain(stuck.x)) else 42
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 40


STUCK = """
import pipert.workers.pool
from pipert import PipelineTimeout
pipert.workers.pool._AT_EXIT = 0.1
pipe = two(second=Double(lambda x: threading.Event().wait()), timeout=0.3)
"""


@pytest.mark.slow
def test_the_program_exits_after_a_timeout_that_was_caught() -> None:
    script = """
try:
    pipe(ROWS)
except PipelineTimeout:
    print("given up")
"""
    result = run(STUCK + script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "given up\n", "")


@pytest.mark.slow
def test_the_program_exits_after_a_timeout_that_nobody_caught_and_shows_the_table() -> None:
    result = run(STUCK + "pipe(ROWS)")
    assert result.returncode == 1
    assert "PipelineTimeout: " in result.stderr and "pipert-cpu-1" in result.stderr


@pytest.mark.slow
@strides
def test_an_interrupt_at_any_place_of_a_call_with_a_timeout_leaves_the_pipe_usable(
    stride: int,
) -> None:
    script = "sweep(has_run, lambda pipe: pipe(ROWS, timeout=3.0))"
    assert run(sweep(stride) + script, PRELUDE).stdout == "True\n"
