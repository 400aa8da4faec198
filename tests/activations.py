"""Whether data is still there, without keeping it there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Activations", "until"]


def until(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` comes true within some seconds; looked at again and again."""
    never = threading.Event()
    for _ in range(300):
        if condition():
            return True
        never.wait(0.01)
    return condition()


class Activations:
    """Knows whether the data of tensors is still there, without keeping it there."""

    def __init__(self) -> None:
        self._expired: list[Callable[[], bool]] = []

    def add(self, tensor: Tensor) -> Tensor:
        data = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._expired.append(data.expired)
        return tensor

    def now(self) -> int:
        """How many are left."""
        return sum(not expired() for expired in self._expired)

    def settled(self, expected: int) -> int:
        """The number there is once it is as expected, or after some seconds.

        A worker drops its last task just after its caller was let go, hence the patience.
        """
        assert self._expired, "no activation was seen"
        until(lambda: self.now() == expected)
        return self.now()

    def left(self) -> int:
        """How many are left when the workers have dropped their last tasks."""
        assert self._expired, "no activation was seen"
        until(lambda: not self.now())
        return self.now()
