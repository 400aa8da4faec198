"""R2, R5, R6: Ctrl-C in a whole step, ``close`` during one, workers that die in it, forks.

What is interrupted has changed no ``.grad``, or all of them: an interrupt may come when the step is
just over. The model is that of ``tests/faults/processes.py``, with skips and deferred statistics.
"""

from __future__ import annotations

import sys

import pytest

from tests.faults.everywhere import strides, sweep
from tests.faults.processes import STEP
from tests.faults.test_dying_workers import DEATHS
from tests.faults.test_interrupts import RAISED
from tests.test_exit import run

pytestmark = pytest.mark.slow

schedules = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])

# ``call`` takes a step, ``is_right_step`` says whether one does what forward and backward do.
WHOLE = (
    STEP
    + """
from pipert import PipertError

def cube(y, target):
    return y.pow(3).sum()

def call(pipe, schedule="1f1b", x=X):
    pipe.forward_backward(x, loss_fn=cube, schedule=schedule, reduction="sum")

def grads(model):
    return [parameter.grad for parameter in model.parameters()]

def is_right_step(pipe, schedule="1f1b", x=X):
    pipe.zero_grad()
    call(pipe, schedule, x)
    found = grads(pipe)
    step(NEVER, x)
    return all(map(torch.allclose, found, grads(NEVER), [1e-4] * 99, [1e-5] * 99))
"""
)


def ends(script: str) -> tuple[int, str, str]:
    """How a script ends: its exit code, and what it writes."""
    result = run(script, WHOLE)
    return result.returncode, result.stdout, result.stderr


@schedules
def test_after_ctrl_c_in_a_step_no_gradient_has_changed_and_the_next_ones_are_right(
    schedule: str,
) -> None:
    script = f"""
for where, checkpoint in wheres("forward", "recomputation", "backward"):
    with pipe_of(checkpoint) as pipe:
        act = lambda where: None
        right = [is_right_step(pipe, "{schedule}")]
        before, copies = grads(pipe), [grad.clone() for grad in grads(pipe)]
        mean = MODEL[5].running_mean.clone()
        act = hit(where, signal.SIGINT)
        try:
            call(pipe, "{schedule}")
            right.append("not interrupted")
        except KeyboardInterrupt:
            after = grads(pipe)
            right.append(all(one is other for one, other in zip(before, after, strict=True)))
            right.append(all(map(torch.equal, copies, after)))
            right.append(torch.equal(mean, MODEL[5].running_mean))
        right += [is_right_step(pipe, "{schedule}"), is_right(pipe)]
        if right != [True] * 6:
            print(where, checkpoint, right)
"""
    assert ends(script) == (0, "", "")


@schedules
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_many_steps_interrupted_at_any_moment_leave_nothing_behind(
    checkpoint: str, schedule: str
) -> None:
    script = f"""
import random
random.seed(0)
sys.setswitchinterval(1e-5)
pipe = pipe_of("{checkpoint}")
step(NEVER)
expected = [grad.clone() for grad in grads(NEVER)]
call(pipe)
wrong = interrupted = halves = 0
due = []

def interrupt(*_):
    if due:  # it may come late
        due.clear()
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for k in range(150):
    pipe.zero_grad()
    try:
        due.append(True)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 2e-2))
        call(pipe, "{schedule}")
        due.clear()
    except KeyboardInterrupt:
        interrupted += 1
        found = {{grad is None for grad in grads(pipe)}}
        halves += len(found) == 2
    if grads(pipe)[0] is not None and None not in grads(pipe):
        wrong += not all(map(torch.allclose, grads(pipe), expected, [1e-4] * 99, [1e-5] * 99))
print(wrong, halves, interrupted > 20, is_right_step(pipe))
pipe.close()
"""
    assert ends(script) == (0, "0 0 True True\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@strides
def test_ctrl_c_at_any_place_of_a_step_is_raised_as_it_is_and_leaves_no_tensor(stride: int) -> None:
    script = "sweep_of_errors(lambda pipe: pipe, call)"
    assert run(sweep(stride) + RAISED + script, WHOLE).stdout == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@strides
def test_after_ctrl_c_at_any_place_of_a_step_the_next_step_is_right(stride: int) -> None:
    script = """
MODEL = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
pipe = Pipe(MODEL, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
NEVER = MODEL
call(pipe)
problems = []
k = 0
while len(problems) < 5:
    pipe.zero_grad()
    where = interrupted_at(k, lambda: call(pipe))
    if where is None:
        break
    found = [grad is None for grad in grads(pipe)]
    if len(set(found)) != 1:
        problems.append(f"some gradients have changed after {where}")
    if within(5, lambda: is_right_step(pipe, "1f1b", X + k)) is not True:
        problems.append(f"the next step hangs or is wrong after {where}")
    k += STRIDE
print(k > 20, *problems, sep="\\n")
within(5, pipe.close)
"""
    assert run(sweep(stride) + script, WHOLE).stdout == "True\n"


def test_a_second_ctrl_c_does_not_end_a_step_before_its_layers() -> None:
    script = """
executing = []

def act(where):
    if where == "backward" and not executing:
        executing.append(True)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        executing.append(True)

logging.getLogger("pipert").addHandler(logging.NullHandler())
logging.getLogger("pipert").propagate = False
pipe = pipe_of("never")
try:
    call(pipe)
except KeyboardInterrupt:
    print(executing, set(grads(pipe)))
print(is_right_step(pipe))
pipe.close()
"""
    assert ends(script) == (0, "[True, True] {None}\nTrue\n", "")


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
    right = [is_right_step(pipe)]
    pipe.zero_grad()
    act = closing(how)
    try:
        call(pipe)
        right.append("nothing raised")
    except PipeClosedError:
        right.append(set(grads(pipe)) == {{None}})
    pipe.close()
    print(right)
"""
    assert ends(script) == (0, "[True, True]\n" * 2, "")


def test_SystemExit_of_a_layer_in_its_backward_ends_the_program() -> None:
    script = """
def act(where):
    if where == "backward":
        sys.exit(7)

call(pipe_of("never"))
"""
    code, _, stderr = ends(script)
    assert (code, "Traceback" in stderr) == (7, False)


# Workers that die ---------------------------------------------------------------------------------

DEATHS_OF_STEPS = """
def after_step(pipe):
    pipe.zero_grad()
    pipe.forward_backward(ROWS, loss_fn=cube, reduction="sum")
    return torch.cat([grad.reshape(-1) for grad in grads(pipe)])

def after_backward(pipe):
    pipe.zero_grad()
    cube(pipe[1](pipe[0](ROWS)), None).backward()
    return torch.cat([grad.reshape(-1) for grad in grads(pipe)])
"""


@pytest.mark.parametrize("name", ["pipert-cpu-0", "pipert-cpu-1", "pipert-clock"])
@strides
@pytest.mark.timeout(120)
def test_an_exception_thrown_into_a_thread_of_pipert_at_any_place_of_a_step_lets_nobody_hang(
    name: str, stride: int
) -> None:
    changes = {
        "lambda: pipe(ROWS)": "lambda: after_step(pipe)",
        "pipe[1](pipe[0](ROWS))": "after_backward(pipe)",
        'chunks=2, checkpoint="always"': 'chunks=1, checkpoint="never"',
    }
    deaths = DEATHS
    for old, new in changes.items():
        assert old in deaths
        deaths = deaths.replace(old, new)
    script = sweep(stride) + DEATHS_OF_STEPS + deaths + f"sweep_of_deaths({name!r})"
    assert run(script, WHOLE).stdout == "True\n"


# Forks --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(sys.modules["os"], "fork"), reason="needs fork")
def test_a_child_takes_a_right_step_of_its_parents_pipe() -> None:
    script = """
pipe = pipe_of("always")
print(is_right_step(pipe), flush=True)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    # Autograd's own threads are gone: the step needs none.
    right = is_right_grads(pipe)
    pipe.close()
    os._exit(not right)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), is_right_step(pipe))
pipe.close()
"""
    before = """
step(NEVER)
EXPECTED = [grad.clone() for grad in grads(NEVER)]

def is_right_grads(pipe):
    pipe.zero_grad()
    call(pipe)
    return all(map(torch.allclose, grads(pipe), EXPECTED, [1e-4] * 99, [1e-5] * 99))
"""
    result = run(before + script, WHOLE)
    assert (result.returncode, result.stdout) == (0, "True\n0 True\n")


@pytest.mark.skipif(not hasattr(sys.modules["os"], "fork"), reason="needs fork")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_child_forked_in_the_middle_of_a_step_takes_a_right_step_and_the_parents_goes_on(
    where: str,
) -> None:
    script = f"""
step(NEVER)
EXPECTED = [grad.clone() for grad in grads(NEVER)]
forked = []

def is_right_now(pipe):
    return all(map(torch.allclose, grads(pipe), EXPECTED, [1e-4] * 99, [1e-5] * 99))

reached, go_on = threading.Event(), threading.Event()

def act(at):
    if at == "{where}" and not reached.is_set():
        reached.set()
        go_on.wait(10)

pipe = pipe_of("never")
pipe.zero_grad()
caller = threading.Thread(target=call, args=(pipe,))
caller.start()
reached.wait(10)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    call(pipe)
    os._exit(not is_right_now(pipe))
go_on.set()
caller.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), is_right_now(pipe))
pipe.close()
"""
    result = run(script, WHOLE)
    assert (result.returncode, result.stdout) == (0, "0 True\n")
