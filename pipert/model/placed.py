"""``Placed``: the settings of a pipe, and the devices of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Self

import torch
from torch import Tensor, nn

from pipert._torch import refuse_unsupported
from pipert.autograd.order import begin_numbers
from pipert.layers.compiling import not_traced
from pipert.layers.cpu_draws import prepare
from pipert.model.devices import assign_workers, where_tensors_are
from pipert.model.settings import check_checkpoints, check_chunks, check_timeout

__all__: list[str] = []


class Placed(nn.Module):
    """A model that is split and placed: the part of a pipe that runs nothing."""

    # Attributes that are set on the object itself, since they are not layers.
    _own = frozenset(
        {
            "_balance", "_checkpoint", "_chunks", "_deferred_batch_norm", "_devices", "_partitions",
            "_timeout", "_workers", "checkpoint", "chunks", "timeout", "training",
        }  # fmt: skip
    )

    _balance: list[int]
    _devices: list[torch.device]
    _workers: list[int]
    _partitions: tuple[nn.Sequential, ...]
    _deferred_batch_norm: bool
    _checkpoint: str | tuple[str, ...] | None  # None if the user has not chosen

    def _live_on(self, devices: list[torch.device], deferred_batch_norm: bool | None) -> None:
        """Note the device of each partition, and prepare the process for layers on workers."""
        self._workers = assign_workers(devices)
        self._devices = where_tensors_are(devices)
        self._deferred_batch_norm = bool(deferred_batch_norm)
        refuse_unsupported()
        prepare()

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition, as torch knows it: logical CPU devices are ``cpu``."""
        return list(self._devices)

    @property
    def partitions(self) -> tuple[nn.Sequential, ...]:
        """The partitions, each an ``nn.Sequential`` of the module's own layers."""
        return self._partitions

    @property
    def chunks(self) -> int:
        """The number of micro-batches, at most. May be assigned between calls."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = check_chunks(chunks)
        begin_numbers(self._chunks)  # nodes made before the first call get numbers above all turns

    @property
    def checkpoint(self) -> str | tuple[str, ...]:
        """Which micro-batches are recomputed: in all partitions, or in each one.

        May be assigned between calls.
        """
        return self._checkpoint or "except_last"

    @checkpoint.setter
    def checkpoint(self, checkpoint: str | Sequence[str] | None) -> None:
        self._checkpoint = check_checkpoints(checkpoint, len(self._partitions))

    @property
    def timeout(self) -> float | None:
        """Seconds that a call may take, or ``None``. May be assigned between calls."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._timeout = check_timeout(timeout)

    @property
    def deferred_batch_norm(self) -> bool:
        """Whether running statistics are updated once for each call."""
        return self._deferred_batch_norm

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Implement ``to``, ``half``, ``cuda``, ``to_empty`` and similar methods."""
        for device in set(self._devices):
            moved = fn(torch.empty(0, device=device)).device
            if moved != device:
                raise RuntimeError(
                    f"the layers of a Pipe live on its devices {list(map(str, self._devices))} and "
                    f"cannot be moved to {moved}; make a new Pipe of the module with other devices,"
                    " or move the layers one by one after close()"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which calls this first."""
        raise not_traced("torch.jit.script")

    def extra_repr(self) -> str:
        return f"chunks={self._chunks}, checkpoint={self.checkpoint!r}"
