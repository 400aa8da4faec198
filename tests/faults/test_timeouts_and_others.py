"""Tests a layer that never returns beside other callers, signals, other pipes, and at exit."""

from __future__ import annotations

import contextlib
import os
import signal
from unittest import TestCase

import pytest
import torch
from torch import nn

from pipert import Pipe, PipeClosedError, PipelineTimeout
from tests.engine.test_exit import run
from tests.faults.stuck import SHORT, WAIT, WHERES, Stuck
from tests.helpers.caller_threads import Caller

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
        error = inner.times_out(lambda: outer(inner.x))
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
