"""An exception at every place of pipert's code, one after the other; or at some of the places.

Each place (``places.py``) costs a call or a step. By default a test tries each place of a few,
``--sweep`` all.
"""

from __future__ import annotations

import pytest

__all__ = ["strides", "sweep"]

STRIDE = 23  # a prime number: no loop of the code has as many places

strides = pytest.mark.parametrize(
    "stride",
    [
        pytest.param(STRIDE, id="some places"),
        pytest.param(1, id="every place", marks=pytest.mark.sweep),
    ],
)


def sweep(stride: int) -> str:
    """What scripts that try each ``stride``-th place begin with."""
    return f"STRIDE = {stride}\n{SWEEP}"


SWEEP = """
from tests.faults.places import Raiser, interrupted_at, of_pipert, within

def threads_left(count, seconds=1.0):
    '''How many threads there are beyond count, after a while if need be.'''
    deadline = time.monotonic() + seconds
    while (left := len(os.listdir("/proc/self/task")) - count) and time.monotonic() < deadline:
        time.sleep(1e-3)
    return left

def sweep(prepare, function):
    '''Interrupt function(pipe) everywhere; each time the pipe must work, and close, afterwards.'''
    problems = []
    k = 0
    while len(problems) < 5:
        threads = len(os.listdir("/proc/self/task"))
        pipe = two(nn.Linear(1, 1), nn.Linear(1, 1), chunks=2, checkpoint="always")
        prepared = prepare(pipe)
        where = interrupted_at(k, lambda: function(prepared))
        if where is None:
            within(5, pipe.close)
            break
        rows = ROWS + k
        expected = pipe[1](pipe[0](rows))
        if function != Pipe.close:
            result = within(3, lambda: pipe(rows))
            if result is None:
                problems.append(f"the next call hangs after {where}")
            elif not torch.allclose(result, expected):
                problems.append(f"the next call is wrong after {where}")
        if not within(3, lambda: [pipe.close()]):
            problems.append(f"close hangs after {where}")
        if left := threads_left(threads):
            problems.append(f"{left} threads are left after {where}")
        k += STRIDE
    print(k > 20, *problems, sep="\\n")

def has_run(pipe):
    pipe(ROWS)
    return pipe
"""
