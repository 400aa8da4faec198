"""``pipeline``: any ``nn.Module``, run pipeline-parallel as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import nn

from pipert._typing import Device, Value
from pipert.driven.model import DrivenModel
from pipert.layers.batchnorm import check_batch_norm
from pipert.layers.buffers import KEEPING
from pipert.layers.generators import DRAWING
from pipert.model.devices import (
    assign_workers,
    default_devices,
    parse_devices,
    where_tensors_are,
)
from pipert.model.partition import Partition
from pipert.model.split import place, sequential
from pipert.pipelined import Pipelined

__all__ = ["ModulePipe", "pipeline"]


class ModulePipe(Pipelined):
    """Runs any ``nn.Module`` over several devices; :func:`pipeline` makes it.

    All but what is said here is as with :class:`Pipe`.
    """

    module: nn.Module
    """The model, on its devices. Its parameters are the pipe's."""

    def __init__(
        self,
        module: nn.Module,
        cuts: list[str],
        devices: Iterable[Device] | None,
        chunks: int,
        checkpoint: str | None,
        deferred_batch_norm: bool | None,
        timeout: float | None,
    ) -> None:
        super().__init__()
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.timeout = timeout
        n = len(cuts) + 1
        parsed = default_devices(n) if devices is None else parse_devices(devices)
        self._workers = assign_workers(parsed[:n])
        self._devices = where_tensors_are(parsed[:n])
        check_batch_norm(module, deferred_batch_norm)
        self._deferred_batch_norm = bool(deferred_batch_norm)
        DRAWING.prepare()
        KEEPING.prepare()
        self._cuts = cuts
        self.__dict__["module"] = module
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.training = module.training
        self._split()
        place(self._partitions, self._devices)
        self._start()

    def _split(self) -> None:
        from pipert.model.cuts import homes, layers_of

        layers = layers_of(self.module, self._cuts)
        at = homes(layers, self._cuts, None)
        self._partitions = tuple(
            sequential({x: m for x, m in layers.items() if at[x] == j}, self.training, Partition)
            for j in range(len(self._cuts) + 1)
        )

    @property
    def cuts(self) -> list[str]:
        """The module with which each partition but the first begins."""
        return list(self._cuts)

    def _model(self) -> DrivenModel:
        return DrivenModel(self.module, self._partitions)

    def _normalised_together(self) -> Sequence[nn.Module]:
        return [self.module]  # a layer may be called in any partition

    def _takes_arguments(self) -> nn.Module:
        return self.module

    def train(self, mode: bool = True) -> Self:
        """As in ``nn.Module``."""
        super().train(mode)
        self.module.training = mode
        for partition in self._partitions:
            partition.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module.load_state_dict(*args, **kwargs)


def pipeline(
    model: nn.Module,
    cuts: Iterable[str] | None = None,
    *,
    partitions: int | None = None,
    example: Any = None,
    devices: Iterable[Device] | None = None,
    chunks: int = 1,
    checkpoint: str | None = None,
    deferred_batch_norm: bool | None = None,
    timeout: float | None = None,
) -> ModulePipe:
    """Make a pipe of any module, which is not rewritten."""
    assert cuts is not None
    return ModulePipe(
        model, list(cuts), devices, chunks, checkpoint, deferred_batch_norm, timeout
    )
