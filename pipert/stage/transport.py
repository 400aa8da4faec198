"""How tensors move between devices and streams: inside the graph, or beside it.

In a call, copies and waits are nodes, whose backward does the same the other way (section 3.2.3 of
the paper). In a step the graph ends at the borders of a stage, and gradients are copied and waited
for by ``B[i,j]``.
"""

from __future__ import annotations

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


class InGraphTransport:
    """Moves tensors inside the graph, where there is one.

    Args:
        device: the stage's.
        grad_enabled: whether there is a graph.
    """

    __slots__ = ("_device", "_grad_enabled")

    def __init__(self, device: torch.device, grad_enabled: bool) -> None:
        self._device = device
        self._grad_enabled = grad_enabled

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


class CutTransport:
    """Moves tensors beside the graph; copies of those that require grad do so, too.

    Args:
        device: the stage's.
    """

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

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
