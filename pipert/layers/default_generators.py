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
from typing import Protocol

import torch

from pipert._torch import backward_id, run_backward
from pipert.layers.cpu_draws import real_generators
from pipert.workers.pool import stack_of

__all__: list[str] = []

_POLL = 0.02  # s; how often the engine's thread looks whether somebody waits for it


class User(Protocol):
    """A task that draws."""

    @property
    def outer(self) -> User | None:
        """The task that it is inside of."""


class DefaultGenerator:
    """The default generator of ``device``, and the tasks that use it."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.generator = real_generators()[device.index] if on_gpu else torch.default_generator
        self.changed = threading.Condition()
        self._users: list[tuple[User, threading.Thread]] = []  # the last one draws

    def enter(self, user: User) -> torch.Tensor:
        """Wait for others (G1); return the generator's state."""
        is_on_gpu = self.generator.device.type == "cuda"
        may_be_awaited = is_on_gpu and backward_id() >= 0  # on the engine's thread
        with self.changed:
            while not (self._is_free_for(user) or may_be_awaited and self._is_in_engine()):
                self.changed.wait(_POLL if may_be_awaited else None)
            self._users.append((user, threading.current_thread()))
        return self.generator.get_state()

    def leave(self, user: User, state: torch.Tensor) -> torch.Tensor:
        """Put ``state`` back; return the one that the user leaves."""
        with self.changed:
            self.changed.wait_for(lambda: self._users[-1][0] is user)
            left = self.generator.get_state()
            self.generator.set_state(state)
            self._users.pop()
            self.changed.notify_all()
        return left

    def _is_free_for(self, user: User) -> bool:
        return not self._users or self._users[-1][0] is user.outer

    def _is_in_engine(self) -> bool:
        """Whether the last user waits for the engine (G3)."""
        stack = stack_of(self._users[-1][1])
        return bool(stack) and stack[-1].name == run_backward.__name__

    def wait(self) -> None:
        """Wait until no task uses the generator; for whoever holds ``changed``."""
        self.changed.wait_for(lambda: not self._users)

    def __repr__(self) -> str:
        return f"<DefaultGenerator of {self.generator.device}, {len(self._users)} users>"


_of_devices: dict[torch.device, DefaultGenerator] = {}  # changed by atomic operations only
os.register_at_fork(after_in_child=_of_devices.clear)  # its tasks do not exist in the child


def default_generator(device: torch.device) -> DefaultGenerator:
    """Return the one object for ``device``."""
    found = _of_devices.get(device)
    return found or _of_devices.setdefault(device, DefaultGenerator(device))
