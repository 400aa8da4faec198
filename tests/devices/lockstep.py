"""Runs tasks one at a time, in schedule order, so that peaks are the same in every run.

Otherwise the number of values in transit between two devices depends on the threads. Here a
worker begins a task when the one posted before it is over. That is one of the possible
orders, since no task needs a later one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipert.engine.clock import LaneTask

__all__ = ["in_lockstep"]

PATIENCE = 30.0  # s, for one task of another worker


class _Queue:
    """Whose turn it is, by the number of the task."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._made, self._turn = 0, 0

    def number(self) -> int:
        with self._changed:
            self._made += 1
            return self._made - 1

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == number, PATIENCE)
        try:
            yield
        finally:
            with self._changed:
                self._turn += 1
                self._changed.notify_all()


def _one_thread() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.set_multithreading_enabled(False)


@contextlib.contextmanager
def in_lockstep() -> Iterator[None]:
    """Calls of one caller in here do one task at a time; autograd, too, has one thread."""
    queue, numbers = _Queue(), dict[int, int]()
    make: Callable[..., None] = LaneTask.__init__
    run: Callable[..., None] = LaneTask.run

    def make_next(task: LaneTask, *args: Any) -> None:
        make(task, *args)
        numbers[id(task)] = queue.number()

    def run_next(task: LaneTask, seat: Any) -> None:
        with queue.turn(numbers.pop(id(task))), _one_thread():
            run(task, seat)

    with pytest.MonkeyPatch.context() as patch, _one_thread():
        patch.setattr(LaneTask, "__init__", make_next)
        patch.setattr(LaneTask, "run", run_next)
        yield
