"""Tests R2 and R5: one or more Ctrl-C in a step with recomputation, skips and deferred statistics.

A whole step that is interrupted has changed no ``.grad``, or all of them: it may have been just
over. ``tests/engine`` has Ctrl-C in a forward, and an interrupt at any place of one call.
"""

from __future__ import annotations

import sys

import pytest

from tests.engine.test_exit import run
from tests.faults.everywhere import strides, sweep
from tests.faults.processes import HOWS, STEP, ends

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", HOWS)
def test_the_next_steps_after_ctrl_c_are_right(how: str) -> None:
    """The interrupted step has changed neither gradients nor running statistics.

    Of a call, the backward is the caller's own.
    """
    script = """
for where, checkpoint in wheres("forward", "recomputation", "backward"):
    with pipe_of(checkpoint) as pipe:
        act = lambda where: None
        found = [is_right(pipe)]
        mean, before = MODEL[5].running_mean.clone(), grads(pipe)
        copies = [grad.clone() for grad in before]
        act = hit(where, signal.SIGINT)
        try:
            train(pipe)
            found.append("not interrupted")
        except KeyboardInterrupt:
            unseen = where == "forward" or HOW != "call"
            found.append(torch.equal(mean, MODEL[5].running_mean) == unseen)
            if unseen:
                same = all(one is other for one, other in zip(before, grads(pipe), strict=True))
                found.append(same and all(map(torch.equal, copies, before)))
        found += [is_right(pipe), is_right(pipe)]
        if set(found) != {True}:
            print(where, checkpoint, found)
"""
    assert ends(script, how) == (0, "", "")


@strides
def test_after_a_second_ctrl_c_at_any_place_a_pipe_goes_on_once_its_layers_are_over(
    stride: int,
) -> None:
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

logging.getLogger("pipert").addHandler(logging.NullHandler())
logging.getLogger("pipert").propagate = False
signal.signal(signal.SIGINT, interrupt)
pipe = two(first=Double(before), chunks=1)
k, first = 0, True
expected = pipe(ROWS)
while len(problems) < 5:
    first = False
    where = interrupted_at(k, lambda: pipe(ROWS), of=of_pipert, ready=lambda: first)
    while any(worker.doing for worker in pipe.statistics().workers):
        time.sleep(1e-3)
    if executing or not torch.equal(pipe(ROWS), expected):
        problems.append(f"it is not right after {where}")
    if where is None:
        break
    k += STRIDE
print(k > 20, *problems, sep="\\n")
pipe.close()
"""
    assert run(sweep(stride) + script, STEP).stdout == "True\n"


INTERRUPTED_AGAIN = """
entered, gave_up, go_on = threading.Event(), threading.Event(), threading.Event()
executing, messages = [], []

def before(x):
    if go_on.is_set():
        return
    executing.append(True)
    entered.set()
    go_on.wait(20)
    executing.pop()

class Keeps(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("chunks=1"):
            return  # advice at the first step
        messages.append(record.getMessage())
        if "What the workers were doing" in messages[-1]:
            gave_up.set()

def interrupt(*_):
    if not gave_up.is_set():
        raise KeyboardInterrupt

def send():
    entered.wait()
    while not gave_up.wait(0.02):
        os.kill(os.getpid(), signal.SIGINT)

log = logging.getLogger("pipert")
log.addHandler(Keeps())
log.propagate = False
signal.signal(signal.SIGINT, interrupt)
pipe = two(nn.Linear(1, 1), Double(before), chunks=1)
sender = threading.Thread(target=send)
sender.start()
try:
    train(pipe, ROWS)
except KeyboardInterrupt:
    print(len(executing), len(messages) > 0)
sender.join()
table = messages[-1].splitlines()
print(table[0].split(" after ")[0], "in before" in messages[-1])
print([line.split()[:2] for line in table[4:5]])
try:
    train(pipe, ROWS)
except RuntimeError as error:
    print(type(error).__name__)
go_on.set()
while pipe.statistics().workers[1].doing is not None:
    time.sleep(1e-3)
train(pipe, ROWS)
pipe.close()
"""


@pytest.mark.main_thread
@pytest.mark.parametrize("how", HOWS)
def test_the_second_ctrl_c_gives_up_like_a_timeout(how: str) -> None:
    text = """1 True
layers of an interrupted call had not returned True
[['pipert-cpu-1', '1']]
WorkerBusyError
"""
    assert ends(INTERRUPTED_AGAIN, how) == (0, text, "")


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
        "a step": "HOW = '1f1b'; sweep_of_errors(lambda pipe: pipe, train)",
    }.items(),
    ids=lambda item: item[0],
)
@strides
def test_ctrl_c_at_any_place_is_raised_as_it_is_and_leaves_no_tensor(
    what: tuple[str, str], stride: int
) -> None:
    assert run(sweep(stride) + RAISED + what[1], STEP).stdout == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@strides
def test_the_next_step_after_ctrl_c_at_any_place_is_right(stride: int) -> None:
    script = """
HOW = "1f1b"
MODEL = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
pipe = Pipe(MODEL, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
NEVER = MODEL
train(pipe)
problems = []
k = 0
while len(problems) < 5:
    pipe.zero_grad()
    where = interrupted_at(k, lambda: train(pipe))
    if where is None:
        break
    if len({grad is None for grad in grads(pipe)}) != 1:
        problems.append(f"some gradients have changed after {where}")
    if within(5, lambda: is_right(pipe, X + k)) is not True:
        problems.append(f"the next step hangs or is wrong after {where}")
    k += STRIDE
print(k > 20, *problems, sep="\\n")
within(5, pipe.close)
"""
    assert run(sweep(stride) + script, STEP).stdout == "True\n"
