"""Tells whether the data of tensors is still alive, without keeping it alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.collection import settle

__all__ = ["Activations", "until"]


def until(condition: Callable[[], bool]) -> bool:
    """Polls ``condition`` for a few seconds; returns whether it came true."""
    never = threading.Event()
    for _ in range(300):
        settle()
        if condition():
            return True
        never.wait(0.01)
    return condition()


class Activations:
    """Weak references to the data of tensors."""

    def __init__(self) -> None:
        self._expired: list[Callable[[], bool]] = []

    def add(self, tensor: Tensor) -> Tensor:
        data = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._expired.append(data.expired)
        return tensor

    def now(self) -> int:
        """Returns how many are alive."""
        return sum(not expired() for expired in self._expired)

    def settled(self, expected: int) -> int:
        """Waits a few seconds for ``expected`` to be alive; returns how many are.

        The wait is needed because a worker drops its last task just after its caller has returned.
        """
        assert self._expired, "no activation was seen"
        until(lambda: self.now() == expected)
        return self.now()

    def left(self) -> int:
        """Returns how many are alive once the workers have dropped their last tasks."""
        assert self._expired, "no activation was seen"
        until(lambda: not self.now())
        return self.now()
