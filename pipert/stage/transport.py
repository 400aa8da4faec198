"""How tensors move between devices and streams: inside the graph, or beside it.

In a call, copies and waits are nodes, whose backward does the same the other way (section 3.2.3 of
the paper). In a step the graph ends at the borders of a stage, and gradients are copied and waited
for by ``B[i,j]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.autograd import streams, transfer
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable

__all__: list[str] = []


class Transport(Protocol):
    """Moves tensors to the device of one stage."""

    def in_graph(self, tensor: Tensor) -> bool:
        """Whether it has a gradient to bring back."""

    def copy(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        """Copy ``tensors``, all on one device, and all in the graph or none.

        Args:
            i: the micro-batch.
            tensors: what to copy.
            source: reads them.
            target: writes the copies.
            origin: the partition that they come from; ``None`` for the caller's.
        """

    def wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        """Let ``waiter`` wait for ``awaited`` before ``x`` is read; return ``x``."""


@dataclass(slots=True, eq=False)
class InGraphTransport:
    """Moves tensors to ``_device`` inside the graph, where there is one."""

    _device: torch.device
    _grad_enabled: bool

    def in_graph(self, tensor: Tensor) -> bool:
        return self._grad_enabled and tensor.requires_grad

    def copy(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        if self.in_graph(tensors[0]):
            to_caller = origin is None
            return transfer.copy(tensors, self._device, source, target, to_caller=to_caller)
        return streams.copy(tensors, self._device, source, target)

    def wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        xs, rebuild = differentiable(x) if self._grad_enabled else ((), None)
        if rebuild is None or not xs:
            streams.wait(waiter, awaited)
            return x
        return rebuild(transfer.wait(xs, waiter, awaited))


@dataclass(slots=True, eq=False)
class CutTransport:
    """Moves tensors to ``_device`` beside the graph; copies of what requires grad do so, too."""

    _device: torch.device

    def in_graph(self, tensor: Tensor) -> bool:
        return tensor.requires_grad

    def copy(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        plain = tuple([tensor.detach() for tensor in tensors])
        moved = streams.copy(plain, self._device, source, target)
        for old, new in zip(tensors, moved, strict=True):
            new.requires_grad_(old.requires_grad)
        return moved

    def wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        streams.wait(waiter, awaited)
        return x
