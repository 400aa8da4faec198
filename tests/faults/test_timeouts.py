"""Tests R6: if a layer never returns, a call or step ends, says where, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, PipeClosedError, PipelineTimeout, WorkerBusyError
from tests.engine.test_exit import run
from tests.faults.stuck import SHORT, WAIT, WHERES, Stuck
from tests.helpers.activations import Activations, until
from tests.helpers.caller_threads import Caller

MODES = ("always", "except_last", "never")

modes = pytest.mark.parametrize("checkpoint", MODES)
wheres = pytest.mark.parametrize("where", WHERES)


# How it is set ------------------------------------------------------------------------------------


def test_a_call_ends_after_the_timeout_of_its_pipe() -> None:
    with Stuck(timeout=SHORT) as stuck:
        stuck.times_out(lambda: stuck.pipe(stuck.x))


def test_a_call_ends_after_a_timeout_of_its_own() -> None:
    with Stuck() as stuck:
        stuck.times_out(lambda: stuck.pipe(stuck.x, timeout=SHORT))


@pytest.mark.parametrize("timeout", [0, float("nan"), "1"])
def test_a_wrong_timeout_is_refused_and_closes_nothing(timeout: Any) -> None:
    with Pipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"]) as pipe:
        for call in (pipe, lambda x, timeout: pipe.close(timeout=timeout)):
            with pytest.raises((TypeError, ValueError), match="timeout must be"):
                call(torch.ones(1), timeout=timeout)
        assert pipe(torch.ones(1)).item() == 1


class TakesTimeout(nn.Module):
    def forward(self, x: Tensor, timeout: float = 5.0) -> Tensor:
        return x * timeout


@pytest.mark.layered  # the first layer is the whole model's forward
def test_a_timeout_that_the_first_layer_takes_too_is_refused() -> None:
    with Pipe(nn.Sequential(TakesTimeout()), [1], devices=["cpu"]) as pipe:
        with pytest.raises(TypeError, match="the first layer takes a keyword of that name"):
            pipe(torch.ones(1), timeout=60.0)
        pipe.timeout = 60.0
        assert pipe(torch.ones(1)).item() == 5


def table_of(error: PipelineTimeout) -> list[str]:
    """Returns the lines of the error's table, without the stacks below."""
    return str(error).split("\n\n")[1].splitlines()


# What it says -------------------------------------------------------------------------------------


@wheres
def test_the_error_says_which_worker_is_stuck_in_which_task_and_function(where: str) -> None:
    with Stuck(i=2, j=1, where=where) as stuck:
        error = stuck.times_out()
    (row,) = [line.split() for line in table_of(error) if line.startswith("pipert-cpu-1 ")]
    assert row[:4] == ["pipert-cpu-1", "1", "2", stuck.phase] and float(row[4]) > 0
    assert "in never_returns" in str(error).partition("pipert-cpu-1 was at")[2]


def test_the_error_shows_the_stacks_of_executing_workers_only() -> None:
    with Stuck(i=1, j=0) as stuck:
        text = str(stuck.times_out())
    assert text.count("most recent call last") == 1 and "pipert-cpu-0 was at" in text


def test_the_error_can_be_pickled() -> None:
    """As happens to errors in a pool of processes."""
    with Stuck() as stuck:
        error = stuck.times_out()
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.workers) == (str(error), error.workers)


# Afterwards ---------------------------------------------------------------------------------------


@wheres
def test_calls_and_steps_are_refused_until_the_layer_returns_and_then_right(where: str) -> None:
    with Stuck(where=where) as stuck:
        stuck.times_out()
        runs: list[Callable[[], Any]] = [stuck.run, lambda: stuck.pipe(stuck.x)]
        for again in runs:
            with pytest.raises(WorkerBusyError, match="pipert-cpu-1 still busy"):
                again()
        assert stuck.is_right()


@wheres
def test_another_run_that_waits_behind_the_stuck_one_is_right(where: str) -> None:
    with Stuck(where=where) as stuck:
        first = Caller(stuck.run, WAIT)
        assert stuck.layer.entered.wait(WAIT)
        second = Caller(stuck.run, WAIT)
        stuck.let_go()
        assert torch.equal(first.result(), second.result())
        assert not stuck.whole or stuck.has(2)


@modes
@pytest.mark.parametrize("at", [(0, 0), (1, 0), (2, 1), (1, 2), (2, 2)], ids=str)
def test_the_next_step_is_right_when_the_worker_is_back(
    at: tuple[int, int], checkpoint: str
) -> None:
    with Stuck(*at, n=3, checkpoint=checkpoint) as stuck:
        stuck.times_out()
        assert stuck.is_right()


# What is kept -------------------------------------------------------------------------------------


def now(seen: dict[int, Activations]) -> dict[int, int]:
    """Returns the number of live activations of each micro-batch that has any."""
    counts = {i: activations.now() for i, activations in seen.items()}
    return {i: count for i, count in counts.items() if count}


@modes
@pytest.mark.parametrize("at", [(0, 0), (1, 1), (2, 1)], ids=str)
def test_no_activation_of_the_call_is_left_when_the_worker_is_back(
    at: tuple[int, int], checkpoint: str, no_gc: None
) -> None:
    seen: dict[int, Activations] = {}
    with Stuck(*at, seen=seen, checkpoint=checkpoint) as stuck:
        stuck.times_out()
        stuck.let_go()
        assert until(lambda: all(w.doing is None for w in stuck.pipe.statistics().workers))
        assert until(lambda: not now(seen)), now(seen)


@pytest.mark.parametrize("where", WHERES[1:])
def test_only_the_micro_batch_in_the_stuck_layer_of_a_step_is_kept_meanwhile(
    where: str, no_gc: None
) -> None:
    seen: dict[int, Activations] = {}
    with Stuck(n=3, m=4, seen=seen, where=where) as stuck:
        stuck.times_out(lambda: stuck.run(SHORT, return_outputs=True))
        assert until(lambda: sum(now(seen).values()) <= 4)  # what it got, and what it has saved
        stuck.let_go()
        assert until(lambda: not now(seen)), now(seen)


# Other callers ------------------------------------------------------------------------------------


def test_a_call_without_a_timeout_that_was_in_flight_gets_its_rows() -> None:
    with Stuck() as stuck:
        patient = Caller(lambda: stuck.pipe(stuck.x))
        assert stuck.layer.entered.wait(WAIT)
        with pytest.raises(PipelineTimeout):
            stuck.pipe(stuck.x, timeout=SHORT)  # behind it
        stuck.let_go()
        assert torch.allclose(patient.result(), stuck.plain(stuck.x))
        assert stuck.is_right()


# Interrupts ---------------------------------------------------------------------------------------


# Closing ------------------------------------------------------------------------------------------


def test_close_gives_up_after_its_timeout_and_names_the_worker() -> None:
    with Stuck() as stuck:
        stuck.times_out()
        with pytest.raises(PipelineTimeout, match="pipert-cpu-1") as info:
            stuck.pipe.close(timeout=SHORT)
        assert "in never_returns" in str(info.value)


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


def test_the_end_of_a_with_statement_does_not_replace_what_is_being_raised() -> None:
    with Stuck(timeout=SHORT) as stuck, TestCase().assertLogs("pipert") as logged:
        with pytest.raises(LookupError), stuck.pipe:
            stuck.times_out(lambda: stuck.pipe(stuck.x))
            raise LookupError
        assert "pipert-cpu-1" in "".join(logged.output)


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
        began = time.monotonic()
        error = inner.times_out(lambda: outer(inner.x))
        assert time.monotonic() - began < WAIT  # or the stuck layer has given up
        assert error.__notes__[-1].startswith("in forward F[0,1]: partition 1 on cpu, layer '1'")
        y = inner.until_back(lambda: outer(inner.x))
        assert torch.allclose(y, inner.plain(inner.x).tanh())


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
def test_the_program_exits_after_a_timeout_that_nobody_caught_and_shows_the_table() -> None:
    result = run(STUCK + "pipe(ROWS)")
    assert result.returncode == 1
    assert "PipelineTimeout: " in result.stderr and "pipert-cpu-1" in result.stderr
