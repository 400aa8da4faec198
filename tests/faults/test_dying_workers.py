"""R6: exceptions thrown into pipert's threads from outside, at any place, cause no hang.

At any place of pipert's code, that is. Inside ``threading`` an exception can leave a lock of
Python's locked, so no test throws at random moments.
"""

from __future__ import annotations

import pytest

from tests.engine.test_exit import run
from tests.faults.everywhere import strides, sweep
from tests.faults.processes import STEP

pytestmark = pytest.mark.slow

# The collector is off, so that no finalizer runs on the thread that is being killed.
DEATHS = """
import contextlib, gc, logging
import pipert.engine.runtime
gc.disable()
pipert.engine.waiting._CHECK = 0.05
logging.getLogger("pipert").addHandler(logging.NullHandler())
logging.getLogger("pipert").propagate = False
threading.excepthook = lambda args: None

PATIENCE = 20  # s; a busy machine takes its time
HANGS = "a hang"

class Thrown(BaseException):
    pass

def outcome(seconds, function):
    '''What function returns or raises; HANGS if that takes longer.'''
    def call():
        try:
            return [function()]
        except BaseException as error:
            return [type(error).__name__]
    result = within(seconds, call)
    return HANGS if result is None else result[0]

def gradients(pipe):
    return torch.cat([grad.reshape(-1) for grad in grads(pipe)])

def trained(pipe):
    if HOW == "call":
        return pipe(ROWS)
    step(pipe, ROWS)
    return gradients(pipe)

def under(block, function):
    with block():
        return function()

def is_right(found, pipe, block):
    expected = under(block, lambda: pipe[1](pipe[0](ROWS)))
    if HOW != "call":
        pipe.zero_grad()
        cube(expected, None).backward()
        expected = gradients(pipe)
    return (isinstance(found, torch.Tensor) and found.dtype == expected.dtype
            and torch.allclose(found, expected))

def sweep_of_deaths(name, block=contextlib.nullcontext):
    '''The call that is hit is made under the block, and those after it without.'''
    problems = []
    k = 0
    while len(problems) < 5:
        raiser = Raiser(
            k, Thrown, lambda code: of_pipert(code) and threading.current_thread().name == name
        )
        options = {"chunks": 2, "checkpoint": "always"} if HOW == "call" else {"chunks": 1}
        pipe = two(nn.Linear(1, 1), nn.Linear(1, 1), **options)
        threading.settrace(raiser.trace)
        found = outcome(PATIENCE, lambda: under(block, lambda: trained(pipe)))
        threading.settrace(None)
        where = raiser.where
        if where is None:
            outcome(PATIENCE, pipe.close)
            break
        if found is HANGS:
            problems.append(f"the call hangs after {where}")
        elif isinstance(found, str):
            if found not in ("Thrown", "WorkerDiedError"):
                problems.append(f"the call raises {found} after {where}")
        elif not is_right(found, pipe, block):
            problems.append(f"the call is wrong after {where}")
        if found is not HANGS:
            for _ in range(10):
                found = outcome(PATIENCE, lambda: trained(pipe))
                if found != "WorkerDiedError":  # as when the worker is about to end
                    break
            if not is_right(found, pipe, contextlib.nullcontext):
                problems.append(f"the next call is {found} after {where}")
            if any(outcome(PATIENCE, pipe.close) is not None for _ in range(2)):
                problems.append(f"close hangs after {where}")
        k += STRIDE
    print(k > 20, *problems, sep="\\n")
"""


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("pipert-cpu-0", "call"), ("pipert-cpu-1", "1f1b"), ("pipert-clock", "1f1b"),
        *[
            pytest.param(*other, marks=pytest.mark.sweep)
            for other in [
                ("pipert-cpu-0", "1f1b"), ("pipert-cpu-1", "call"), ("pipert-clock", "call")
            ]
        ],
    ],
)  # fmt: skip
@strides
@pytest.mark.timeout(120)
def test_an_exception_thrown_into_a_thread_of_pipert_at_any_place_causes_no_hang(
    name: str, how: str, stride: int
) -> None:
    script = f"HOW = {how!r}; sweep_of_deaths({name!r})"
    assert run(sweep(stride) + DEATHS + script, STEP).stdout == "True\n"


@strides
def test_an_exception_thrown_into_a_worker_at_any_place_leaves_no_context_of_the_caller(
    stride: int,
) -> None:
    """W4: a worker hit while it enters or leaves the context takes no more tasks."""
    script = "HOW = 'call'; sweep_of_deaths('pipert-cpu-0', lambda: torch.autocast('cpu'))"
    assert run(sweep(stride) + DEATHS + script, STEP).stdout == "True\n"
