"""Runs tasks one at a time, in schedule order, so that peaks are the same in every run.

Otherwise the number of values in transit between two devices depends on the threads' timing. Here
a worker begins a task only when the task posted before it is over. No task needs a later one, so
this is one of the possible orders.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipert.stage.stage import Task

__all__ = ["in_lockstep"]

PATIENCE = 30.0  # s, for one task of another worker


class _Queue:
    """Gives numbered tasks their turns, in the order of their numbers."""

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
    """Makes the calls of one caller run one task at a time, and autograd use one thread."""
    queue, numbers = _Queue(), dict[int, int]()
    make: Callable[..., None] = Task.__init__
    receive: Callable[..., Any] = Task.receive
    send: Callable[..., None] = Task.send
    turns = threading.local()  # each worker's turn, from its receive to the end of its send

    def make_next(task: Task, *args: Any) -> None:
        make(task, *args)
        numbers[id(task)] = queue.number()

    def receive_next(task: Task) -> Any:
        turns.block = contextlib.ExitStack()
        turns.block.enter_context(queue.turn(numbers.pop(id(task))))
        turns.block.enter_context(_one_thread())
        return receive(task)

    def send_last(task: Task, result: Any) -> None:
        with turns.block:
            send(task, result)

    with pytest.MonkeyPatch.context() as patch, _one_thread():
        patch.setattr(Task, "__init__", make_next)
        patch.setattr(Task, "receive", receive_next)
        patch.setattr(Task, "send", send_last)
        yield
