"""Tells whether two threads of the machine share a core.

Two cores of a virtual machine may be halves of one core of its host, for seconds or minutes. What
two threads do at once then takes up to 1.7 times the CPU time, while a product that uses one core
at a time is as fast as ever. So the times of a product that uses both say nothing about it then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["watched_cores"]

_SHARED = 1.2  # the factor in CPU time: 0.95 to 1.1 on cores of their own, 1.35 to 1.7 on one
_SIDE, _PRODUCTS = 128, 50  # some 2 ms, nearly all of it without the interpreter's lock


@contextmanager
def watched_cores() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether two threads at once take more CPU time than one."""
    matrix = torch.rand(_SIDE, _SIDE)
    with ThreadPoolExecutor(2, thread_name_prefix="cores") as threads:

        def are_shared() -> bool:
            alone = threads.submit(_multiply, matrix).result()
            at_once = [threads.submit(_multiply, matrix) for _ in range(2)]
            return sum(each.result() for each in at_once) > 2 * _SHARED * alone

        are_shared()  # the first products do more
        yield are_shared


def _multiply(matrix: Tensor) -> float:
    """Multiplies a few times; returns the thread's CPU time in seconds."""
    started = time.thread_time()
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)
    return time.thread_time() - started
