"""P4: the interpreter always exits, with its own code and nothing to say; and what Ctrl-C does.

No script here has a *daemon* thread of its own in a torch operation or a backward when it ends, nor
one that drops a tensor then: torch itself aborts the program for that, with or without pipert.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.everywhere import strides, sweep
from tests.helpers import scripts

pytestmark = pytest.mark.slow

PRELUDE = """
import os, signal, sys, threading, time
import torch
from torch import nn
from pipert import Pipe, PipeClosedError

ROWS = torch.arange(16.0).reshape(16, 1)

class Double(nn.Module):
    def __init__(self, before=lambda x: None):
        super().__init__()
        self.before = before

    def forward(self, x):
        self.before(x)
        return x * 2

def two(first=None, second=None, chunks=4, **kwargs):
    layers = nn.Sequential(first or Double(), second or Double())
    return Pipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=chunks, **kwargs)

def fail(error):
    raise error
"""


def run(
    script: str, prelude: str = PRELUDE, fresh: bool = False, whole_end: bool = False
) -> subprocess.CompletedProcess[str]:
    return scripts.run(prelude + script, fresh, whole_end)


def ends(script: str, fresh: bool = False) -> tuple[int, str]:
    """Runs a script; returns its exit code and stderr."""
    result = run(script, fresh=fresh, whole_end=True)
    return result.returncode, result.stderr


# The program ends


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_pitfall_10_it_exits_with_an_unclosed_pipe(fresh: bool) -> None:
    assert ends("pipe = two(); pipe(ROWS)", fresh=fresh) == (0, "")


def test_pitfall_9_SystemExit_in_a_layer_ends_the_program() -> None:
    script = """
pipe = two(first=Double(lambda x: sys.exit(4)))
pipe(ROWS)
print("still here")
"""
    result = run(script, whole_end=True)
    assert (result.returncode, result.stdout, result.stderr) == (4, "", "")


def test_a_program_exits_in_the_middle_of_a_daemon_threads_run() -> None:
    script = """
running = threading.Event()
pipe = two(first=Double(lambda x: (running.set(), time.sleep(0.05))), chunks=16)

def serve():
    try:
        while True:
            pipe(ROWS)
    except PipeClosedError:
        threading.Event().wait()  # drops no tensor

threading.Thread(target=serve, daemon=True).start()
running.wait()
"""
    assert ends(script) == (0, "")


def test_a_program_exits_when_threads_that_trained_have_just_ended() -> None:
    script = """
pipe = Pipe(nn.Sequential(nn.Linear(1, 1), nn.Dropout()), [1, 1], devices=["cpu", "cpu"], chunks=2)

def train():
    pipe(ROWS).sum().backward()
    pipe.forward_backward(ROWS, loss_fn=lambda y, _: y.sum())
    pipe.close()

threading.Thread(target=train).start()
"""
    assert [ends(script) for _ in range(2)] == [(0, "")] * 2


def test_a_program_exits_with_a_layer_that_never_returns() -> None:
    script = """
import pipert.workers.pool
pipert.workers.pool._AT_EXIT = 0.1
running = threading.Event()
pipe = two(first=Double(lambda x: (running.set(), threading.Event().wait())))
threading.Thread(target=lambda: pipe(ROWS), daemon=True).start()
running.wait()
"""
    assert ends(script) == (0, "")


def test_a_pipe_may_be_called_by_a_function_that_runs_at_exit_before_ours() -> None:
    script = """
import atexit
pipe = two()
atexit.register(lambda: print(torch.equal(pipe(ROWS), ROWS * 4)))
"""
    result = run(script, whole_end=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


# Ctrl-C

INTERRUPTED = """
executed = []
caught = []
done = []

def interrupt(*signal_and_frame):
    if not caught:
        caught.append(True)
        signal.default_int_handler(*signal_and_frame)

signal.signal(signal.SIGINT, interrupt)

def before(x):
    executed.append(int(x[0]))
    while not caught:  # CPython misses one that comes just before it blocks
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.005)
    if not done:
        time.sleep(0.05)  # what a layer takes

pipe = two(first=Double(before), chunks=16)
try:
    pipe(ROWS)
except KeyboardInterrupt:
    done.append("interrupted")
"""


def test_ctrl_c_raises_in_the_caller_and_the_next_call_returns_its_own_rows() -> None:
    """It waits for no layer that has not begun, and none begins after it; the program exits."""
    script = """
count, other = len(executed), -1 - ROWS
print(done, count < 8, torch.equal(pipe(other), other * 4))
pipe.close()  # joins
print(sorted(executed[count:]) == sorted(int(x) for x in other))
"""
    result = run(INTERRUPTED + script)
    assert (result.returncode, result.stdout, result.stderr) == (
        0, "['interrupted'] True True\nTrue\n", "",
    )  # fmt: skip


# Ctrl-C at every place of what the caller is in.

SWEEP_OF_CLOSE_DURING_A_CALL = """
problems = []
k = 0
while len(problems) < 5:
    running, go_on = threading.Event(), threading.Event()
    pipe = two(first=Double(lambda x: (running.set(), go_on.wait())))
    call = threading.Thread(target=lambda: within(10, lambda: pipe(ROWS)), daemon=True)
    threading.excepthook = lambda args: None  # the call fails, as it should
    call.start()
    running.wait()
    where = interrupted_at(k, pipe._runtime.pool.stop)  # what close does before it joins
    go_on.set()
    pipe.close()
    call.join(3)
    if call.is_alive():
        problems.append(f"the call hangs after {where}")
    if where is None:
        break
    k += min(STRIDE, 3)  # there are few
print(k > 4, *problems, sep="\\n")
"""


@pytest.mark.parametrize(
    "what",
    {
        "the first call": "sweep(lambda pipe: pipe, lambda pipe: pipe(ROWS))",
        "a backward": "sweep(lambda pipe: pipe(ROWS).sum(), lambda loss: loss.backward())",
        "close": "sweep(has_run, Pipe.close)",
        "close during a call": SWEEP_OF_CLOSE_DURING_A_CALL,
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@strides
def test_ctrl_c_at_any_place_of(what: tuple[str, str], stride: int) -> None:
    assert run(sweep(stride) + what[1]).stdout == "True\n"
