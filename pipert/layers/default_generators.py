"""Hands a device's default generator from task to task.

Operations draw from it, and so do kernels of other libraries, which no dispatcher sees. So a task
that draws has it to itself: it seeds it, computes, and puts its old state back.

* **G1** a task waits until no other uses the generator. So what other threads draw meanwhile,
  without a pipe, is the only thing that is disturbed.
* **G2** a task that goes backward on a GPU waits for autograd's thread of that GPU. If that thread
  has just begun to recompute for another caller, it must not wait in turn: it is let in, and the
  task goes on afterwards. So the tasks are a stack.
* **G3** whoever waits notices a task whose thread has died, or whose run was given up: such a task
  no longer counts, even if it is stuck in a layer.
* **G4** nobody waits for another run, or for another generator out of order, while it has one
  (``random_numbers.paused``).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from pipert._torch import backward_id

_CHECK = 0.5  # s; how often whoever waits looks whether a task still counts


class _Use(NamedTuple):
    user: Any
    """The task that draws, a ``TaskRng``."""
    thread: threading.Thread
    before: torch.Tensor
    """The generator's state."""


class DefaultGenerator:
    """The default generator of ``device``, and the tasks that use it."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.generator: torch.Generator = (
            torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        )
        self._changed = threading.Condition()
        self._uses: list[_Use] = []  # the last one draws

    def enter(self, user: Any) -> None:
        """Wait for others (G1, G2)."""
        with self._changed:
            if any([use.user is user for use in self._uses]):  # an interrupt came after it entered
                return
            while self._uses and not self._is_free_for(user) and not user.is_given_up:
                self._changed.wait(_CHECK)
            if user.is_given_up:
                raise RuntimeError("the run was given up while this task waited for a generator")
            thread, before = threading.current_thread(), self.generator.get_state()
            self._uses.append(_Use(user, thread, before))

    def leave(self, user: Any) -> torch.Tensor | None:
        """Put the state from before back; return the one that the user leaves.

        Returns ``None`` if it does not use the generator.
        """
        with self._changed:
            while any(use.user is user for use in self._uses):
                if self._last_user() is user:
                    left = self.generator.get_state()
                    self._drop_last()
                    return left
                self._changed.wait(_CHECK)
        return None

    def _is_free_for(self, user: Any) -> bool:
        last = self._last_user()
        if last is None:
            return True
        in_its_backward = last.is_backward and last.device == user.device
        return in_its_backward and user.device.type == "cuda" and backward_id() >= 0

    def _last_user(self) -> Any:
        """Return the user that draws now (G3)."""
        while self._uses and not _counts(self._uses[-1]):
            self._drop_last()
        return self._uses[-1].user if self._uses else None

    def _drop_last(self) -> None:
        self.generator.set_state(self._uses[-1].before)
        self._uses.pop()
        self._changed.notify_all()

    @contextlib.contextmanager
    def outside(self) -> Iterator[torch.Generator]:
        """Return a block with a generator whose state is that outside of all tasks."""
        with self._changed:
            if self._last_user() is None:
                yield self.generator
                return
            stand_in = torch.Generator(self.generator.device)
            stand_in.set_state(self._uses[0].before)
            yield stand_in
            self._uses[0] = self._uses[0]._replace(before=stand_in.get_state())


def _counts(use: _Use) -> bool:
    return use.thread.is_alive() and not use.user.is_given_up


_of_devices: dict[torch.device, DefaultGenerator] = {}  # changed by atomic operations only
os.register_at_fork(after_in_child=_of_devices.clear)  # its tasks do not exist in the child


def default_generator(device: torch.device) -> DefaultGenerator:
    """Return the one object for ``device``."""
    found = _of_devices.get(device)
    return found or _of_devices.setdefault(device, DefaultGenerator(device))
