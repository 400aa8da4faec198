"""Hands a device's default generator from task to task.

Operations on a GPU draw from it, and so do kernels of other libraries inside of their own, which no
dispatcher sees. So a task has it to itself: it seeds it, computes, and puts its old state back. All
of that is done by the host, in microseconds.

* **G1** a task waits until no other uses the generator. So what other threads draw on the device
  meanwhile, without a pipe, is the only thing that is disturbed.
* **G2** a task inside of another one, on the same thread or on one of its backward, uses the
  generator before the outer one goes on. So they are a stack.
* **G3** a task that goes backward on a GPU, in a step or in a layer, waits for the engine's thread
  of that GPU. If that thread has just begun to recompute for another caller, it must not wait in
  turn: it is let in, and the task goes on afterwards.
* **G4** nobody waits for another run while it has a generator (``random_numbers.paused``).
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple, Protocol

import torch

from pipert._torch import backward_id, run_backward
from pipert.layers.cpu_draws import real_generators
from pipert.workers.pool import stack_of

_POLL = 0.02  # s; how often the engine's thread looks whether somebody waits for it
_CHECK = 0.5  # s; how often others look whether the thread of a user has died


class User(Protocol):
    """A task that draws."""

    @property
    def outer(self) -> User | None:
        """The task that it is inside of."""


class _Use(NamedTuple):
    user: User
    thread: threading.Thread
    before: torch.Tensor
    """The generator's state."""


class DefaultGenerator:
    """The default generator of ``device``, and the tasks that use it."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.generator = real_generators()[device.index] if on_gpu else torch.default_generator
        self.changed = threading.Condition()
        self._uses: list[_Use] = []  # the last one draws

    def enter(self, user: User) -> None:
        """Wait for others (G1)."""
        is_on_gpu = self.generator.device.type == "cuda"
        may_be_awaited = is_on_gpu and backward_id() >= 0  # on the engine's thread
        with self.changed:
            while not (self._is_free_for(user) or may_be_awaited and self._is_in_engine()):
                self.changed.wait(_POLL if may_be_awaited else _CHECK)
            thread, before = threading.current_thread(), self.generator.get_state()
            self._uses.append(_Use(user, thread, before))

    def leave(self, user: User) -> torch.Tensor | None:
        """Put the state from before back; return the one that the user leaves.

        Returns ``None`` if it does not use the generator.
        """
        with self.changed:
            if not any(use.user is user for use in self._uses):
                return None
            while self._last_user() is not user:
                self.changed.wait(_CHECK)
            left = self.generator.get_state()
            self._drop_last()
        return left

    def _last_user(self) -> User | None:
        """Return the user that draws now; those whose threads were ended from outside leave."""
        while self._uses and not self._uses[-1].thread.is_alive():
            self._drop_last()
        return self._uses[-1].user if self._uses else None

    def _drop_last(self) -> None:
        self.generator.set_state(self._uses[-1].before)
        self._uses.pop()
        self.changed.notify_all()

    def _is_free_for(self, user: User) -> bool:
        last = self._last_user()
        return last is None or last is user.outer

    def _is_in_engine(self) -> bool:
        """Whether the last user waits for the engine (G3)."""
        stack = stack_of(self._uses[-1].thread)
        return bool(stack) and stack[-1].name == run_backward.__name__

    def wait(self) -> None:
        """Wait until no task uses the generator; for whoever holds ``changed``."""
        while self._last_user() is not None:
            self.changed.wait(_CHECK)

    def __repr__(self) -> str:
        return f"<DefaultGenerator of {self.generator.device}, {len(self._uses)} users>"


_of_devices: dict[torch.device, DefaultGenerator] = {}  # changed by atomic operations only
os.register_at_fork(after_in_child=_of_devices.clear)  # its tasks do not exist in the child


def default_generator(device: torch.device) -> DefaultGenerator:
    """Return the one object for ``device``."""
    found = _of_devices.get(device)
    return found or _of_devices.setdefault(device, DefaultGenerator(device))
