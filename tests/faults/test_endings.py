"""Tests P2 to P5 in the middle of a step: SIGTERM, exits and forks, each in its own process.

The steps have recomputation, skips and deferred statistics. ``tests/engine/test_exit.py`` and
``tests/engine/test_fork.py`` have what happens in plain forwards.
"""

from __future__ import annotations

import os

import pytest

from tests.faults.processes import ends

pytestmark = pytest.mark.slow


def test_a_handler_of_sigterm_may_close_the_pipe_in_the_middle_of_a_forward() -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: pipe.close())
for checkpoint in ("always", "except_last", "never"):
    pipe = pipe_of(checkpoint)
    act = hit("forward", signal.SIGTERM, 0.6)  # longer than a signal may wait
    try:
        step(pipe)
    except PipeClosedError:
        print([thread.name for thread in threading.enumerate() if "pipert" in thread.name])
"""
    assert ends(script) == (0, "[]\n" * 3, "")


# Exit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
def test_close_in_a_step_from_a_layer_or_another_thread_ends_it_without_a_gradient(
    where: str,
) -> None:
    script = f"""
def closing(how):
    def act(at):
        if at == "{where}" and not done:
            done.append(True)
            how()
    return act

def by_a_thread():
    thread = threading.Thread(target=pipe.close)
    thread.start()
    while not pipe._runtime.pool.closed:
        time.sleep(1e-3)

for how in (lambda: pipe.close(), by_a_thread):
    done = []
    act = lambda at: None
    pipe = pipe_of("always")
    found = [is_right(pipe)]
    pipe.zero_grad()
    act = closing(how)
    try:
        train(pipe)
        found.append("nothing raised")
    except PipeClosedError:
        found.append(set(grads(pipe)) == {{None}})
    pipe.close()
    print(found)
"""
    assert ends(script, "1f1b") == (0, "[True, True]\n" * 2, "")


def test_SystemExit_of_a_layer_in_its_backward_ends_the_program() -> None:
    script = """
def act(where):
    if where == "backward":
        sys.exit(7)

train(pipe_of("never"))
"""
    code, _, stderr = ends(script, "1f1b", whole_end=True)
    assert (code, "Traceback" in stderr) == (7, False)


def test_sys_exit_waits_for_the_steps_of_a_thread_that_is_no_daemon() -> None:
    script = """
pipe = pipe_of("always")
running = threading.Event()

def act(where):
    running.set()
    time.sleep(0.002)

def serve():
    print(is_right(pipe), is_right(pipe))

threading.Thread(target=serve).start()
running.wait()
sys.exit(5)
"""
    assert ends(script, whole_end=True) == (5, "True True\n", "")


# Fork ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("how", ["call", "1f1b"])
def test_a_child_forked_in_the_middle_of_a_step_takes_a_right_step(how: str) -> None:
    """The step has skips and deferred statistics; the parent's step is right, too."""
    script = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
wanted = expected()
parent = os.getpid()
for target, checkpoint in wheres("forward", "recomputation", "backward"):
    pipe = pipe_of(checkpoint)
    reached, go_on = threading.Event(), threading.Event()

    def act(where):
        if where == target and os.getpid() == parent and not reached.is_set():
            reached.set()
            go_on.wait(20)

    results = []
    thread = threading.Thread(target=lambda: results.append(step(pipe)))
    thread.start()
    reached.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(40 if right(step(pipe), wanted) and pipe.close() is None else 41)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    go_on.set()
    thread.join()
    pipe.close()
    if code != 40 or not right(results[0], wanted):
        print(target, checkpoint, code, right(results[0], wanted))
"""
    assert ends(script, how) == (0, "", "")
