"""R2, R5: Ctrl-C in a step with recomputation, skips and deferred statistics, and more than one.

``tests/test_exit.py`` has Ctrl-C in a forward, and an interrupt at any place of one call.
"""

from __future__ import annotations

import sys

import pytest

from tests.faults.everywhere import strides, sweep
from tests.faults.processes import STEP, ends
from tests.test_exit import run

pytestmark = pytest.mark.slow

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def test_after_ctrl_c_in_a_step_the_next_ones_are_right() -> None:
    """And the running statistics have not seen what was interrupted in its forward."""
    script = """
for where, checkpoint in wheres("forward", "recomputation", "backward"):
    with pipe_of(checkpoint) as pipe:
        act = lambda where: None
        right = [is_right(pipe)]
        before = MODEL[5].running_mean.clone()
        act = hit(where, signal.SIGINT)
        try:
            step(pipe)
            right.append("not interrupted")
        except KeyboardInterrupt:
            right.append(torch.equal(before, MODEL[5].running_mean) == (where == "forward"))
        right += [is_right(pipe), is_right(pipe)]
        if right != [True] * 4:
            print(where, checkpoint, right)
"""
    assert ends(script) == (0, "", "")


@modes
def test_many_steps_interrupted_at_any_moment_leave_nothing_behind(checkpoint: str) -> None:
    script = f"""
import random
random.seed(0)
sys.setswitchinterval(1e-5)
pipe = pipe_of("{checkpoint}")
expected = step(NEVER)
step(pipe)
wrong = interrupted = 0
due = []

def interrupt(*_):
    if due:  # it may come late
        due.clear()
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for k in range(200):
    torch.set_grad_enabled(True)  # torch.no_grad does not put it back when it is interrupted
    try:
        due.append(True)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 8e-3))
        found = step(pipe)
        due.clear()
    except KeyboardInterrupt:
        interrupted += 1
    else:
        wrong += not all(map(torch.allclose, found, expected, [1e-4] * 99, [1e-5] * 99))
print(wrong, interrupted > 20, is_right(pipe))
pipe.close()
"""
    assert ends(script) == (0, "0 True True\n", "")


@strides
def test_a_second_ctrl_c_at_any_place_does_not_end_a_call_before_its_layers(
    stride: int,
) -> None:
    """R2: what is executing cannot be interrupted, however often one tries."""
    script = """
executing, problems = [], []
first = False

def interrupt(*_):
    global first
    if not first:
        first = True
        raise KeyboardInterrupt

def before(x):
    executing.append(True)
    while not first:  # CPython misses one that comes just before it blocks
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.005)
    time.sleep(0.03)
    executing.pop()

def again_at(k, function):
    '''Call function, which is interrupted; once more at the k-th place it comes to from there.'''
    count, where = 0, None

    def local(frame, event, arg):
        nonlocal count, where
        if first and event == "opcode" and frame.f_lasti in places(frame.f_code):
            if count == k:
                sys.settrace(None)
                where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise KeyboardInterrupt
            count += 1
        return local

    def trace(frame, event, arg):
        if f"{os.sep}pipert{os.sep}" in frame.f_code.co_filename:
            frame.f_trace_opcodes = True
            return local

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return where

logging.getLogger("pipert").addHandler(logging.NullHandler())
logging.getLogger("pipert").propagate = False
signal.signal(signal.SIGINT, interrupt)
pipe = two(first=Double(before), chunks=1)
k = 0
while len(problems) < 5:
    first = False
    where = again_at(k, lambda: pipe(ROWS))
    if executing:
        problems.append(f"a layer is executing after {where}")
        while executing:
            time.sleep(1e-3)
    if where is None:
        break
    k += STRIDE
print(k > 20, *problems, sep="\\n")
pipe.close()
"""
    assert run(sweep(stride) + script, STEP).stdout == "True\n"


def test_a_ctrl_c_while_the_one_before_is_logged_does_not_end_a_call_before_its_layers() -> None:
    script = """
entered, go_on = threading.Event(), threading.Event()
executing, results = [], []

def before(x):
    executing.append(True)
    entered.set()
    go_on.wait(10)
    executing.pop()

class Interrupts(logging.Handler):
    def emit(self, record):
        threading.Timer(0.2, go_on.set).start()
        signal.raise_signal(signal.SIGINT)

def send():
    entered.wait()
    for _ in range(2):  # the second one is logged
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

log = logging.getLogger("pipert")
log.addHandler(Interrupts())
log.propagate = False
pipe = two(first=Double(before), chunks=1)
sender = threading.Thread(target=send)
sender.start()
try:
    pipe(ROWS)
except KeyboardInterrupt:
    print(executing)
sender.join()
go_on.set()
pipe.close()
"""
    result = run(script, STEP)
    assert (result.returncode, result.stdout) == (0, "[]\n")


# Like a script's ``sweep``, but for what is raised, and for what is kept with the collector off.
RAISED = """
import gc
from torch.multiprocessing.reductions import StorageWeakRef

def raised_at(k, function):
    '''What function raises that is interrupted at the k-th place; (None, None) if there is none.'''
    error = []

    def call():
        try:
            function()
        except BaseException as raised:
            error.append(type(raised).__name__)
            raise

    where = interrupted_at(k, call)
    return where, error[0] if error else None

class Seen(Acts):
    def forward(self, x):
        y = super().forward(x)
        seen.append(StorageWeakRef(y.untyped_storage()))
        return y

def sweep_of_errors(prepare, function, leaks=True):
    problems = []
    k = 0
    gc.disable()
    while len(problems) < 5:
        seen.clear()
        pipe = Pipe(nn.Sequential(Seen(3, 3), Seen(3, 3)), [1, 1], devices=["cpu"] * 2, chunks=2,
                    checkpoint="always")
        prepared = prepare(pipe)
        where, error = raised_at(k, lambda: function(prepared))
        del prepared
        if where is None:
            pipe.close()
            break
        # One that comes where nobody can be told, as in a finalizer, is swallowed by Python.
        if error not in ("KeyboardInterrupt", None):
            problems.append(f"{error} instead of KeyboardInterrupt after {where}")
        within(3, pipe.close)
        torch.autograd.backward(torch.ones((), requires_grad=True))
        if leaks and (left := sum(not data.expired() for data in seen)):
            problems.append(f"{left} tensors are left after {where}")
        k += STRIDE
    print(k > 20, *problems, sep="\\n")

seen = []
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "what",
    {
        "a call": "sweep_of_errors(lambda pipe: pipe, lambda pipe: pipe(X))",
        "a backward": "sweep_of_errors(lambda pipe: pipe(X).sum(), lambda loss: loss.backward())",
    }.items(),
    ids=lambda item: item[0],
)
@strides
def test_ctrl_c_at_any_place_is_raised_as_it_is_and_leaves_no_tensor(
    what: tuple[str, str], stride: int
) -> None:
    assert run(sweep(stride) + RAISED + what[1], STEP).stdout == "True\n"
