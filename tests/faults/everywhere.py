"""Raises an exception at one place of pipert's code after the other, in all or some of the places.

Each place (``places.py``) costs a call or a step. By default a test tries every 23rd place; with
``--sweep`` it tries all.
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
    """Returns the beginning of a script that tries every ``stride``-th place."""
    return f"STRIDE = {stride}\n{SWEEP}"


SWEEP = """
from tests.faults.places import Raiser, interrupted_at, of_pipert, within

def threads_left(count, seconds=1.0):
    '''Waits until there are no more threads than count; returns how many more are left.'''
    deadline = time.monotonic() + seconds
    while (left := len(os.listdir("/proc/self/task")) - count) and time.monotonic() < deadline:
        time.sleep(1e-3)
    return left

def sweep(prepare, function):
    '''Interrupts function(pipe) at each place; afterwards the pipe must work, and close.'''
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
