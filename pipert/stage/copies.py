"""Brings values to a stage from other devices: which tensors are copied, when, and how.

In a call, copies and waits are nodes whose backward does the same in the opposite direction
(section 3.2.3 of the paper). In a step the graph ends at the borders of a stage, and ``B[i,j]``
copies the gradients and waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.autograd import streams, transfer
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable, select
from pipert.skip.routes import PartitionSkips
from pipert.stage.run import Run


class Transport(Protocol):
    """Moves tensors to the device of one stage."""

    def in_graph(self, tensor: Tensor) -> bool:
        """Return whether a gradient of ``tensor`` will have to be brought back."""

    def copy(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        """Copy ``tensors``, which are all on one device, and either all in the graph or all not.

        They come from partition ``origin``, or from the caller if it is ``None``. They are read on
        stream ``source``; the copies are written on stream ``target``.
        """

    def wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        """Make stream ``waiter`` wait for ``awaited`` before it reads ``x``; return ``x``."""


@dataclass(slots=True, eq=False)
class PlainTransport:
    """A transport that is not recorded."""

    _device: torch.device
    _is_cut: bool
    """Whether the graph is cut, as in a step: copies of what requires grad require grad as well.

    Else copies and waits are nodes of the graph, where there is one.
    """

    def in_graph(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and (self._is_cut or torch.is_grad_enabled())

    def copy(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        if self.in_graph(tensors[0]) and not self._is_cut:
            to_caller = origin is None
            return transfer.copy(i, tensors, self._device, source, target, to_caller)
        plain = tuple([tensor.detach() for tensor in tensors])
        moved = streams.copy(plain, self._device, source, target)
        if self._is_cut:
            for old, new in zip(tensors, moved, strict=True):
                new.requires_grad_(old.requires_grad)
        return moved

    def wait(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        if torch.is_grad_enabled() and not self._is_cut:
            xs, rebuild = differentiable(x)
            if xs:
                return rebuild(transfer.wait(xs, waiter, awaited))
        streams.wait(waiter, awaited)
        return x


class Copies:
    """The copies to the device of stage *j*. Used by its worker only."""

    def __init__(
        self, run: Run, j: int, skips: PartitionSkips, transport: Transport,
        from_any: bool = False,
    ) -> None:  # fmt: skip
        self._run = run
        self._device = run.devices[j]
        self.transport = transport
        self.previous = j - 1 if j > 0 else None
        """The partition that the input comes from; ``None`` for the caller."""
        every = range(len(run.devices))
        sources = [*(every if from_any else every[:j][-1:]), *[k for _, k in skips.arriving]]
        readers = [*every[j + 1 : j + 2], *[k for _, k in skips.leaving]]
        # Whether values come, or may come, from other devices, and whether others copy from here.
        self.come_in = j == 0 or any([run.devices[k] != self._device for k in sources])
        self.go_out = any([run.devices[k] != self._device for k in readers])

    def stream(self, i: int) -> Stream:
        """Return the copy stream of micro-batch ``i`` on this device; ``None`` on CPU."""
        return self._run.streams.get(self._device, i)

    def bring(self, i: int, x: Value, origin: int | None) -> Value:
        """Copy a value here from partition ``origin``, or the caller; let compute wait for that."""
        x, copied = self.copy(i, x, origin)
        return x if copied is None else self.wait(i, x, copied)

    def wait(self, i: int, x: Value, copied: Stream) -> Value:
        """Make the compute stream wait for the copy; in the backward, the copy for compute."""
        return self.transport.wait(i, x, streams.compute_stream(self._device), copied)

    def copy(self, i: int, x: Value, origin: int | None) -> tuple[Value, Stream]:
        """Copy a value to this device from partition ``origin``, or from the caller if ``None``.

        Also return the stream to wait for before it is read, or ``None``.

        Moves every tensor that the caller passes, and those of a partition that are on its own
        device. What a layer keeps elsewhere on purpose, such as lengths on the CPU, stays there.
        """
        home = self._device
        source_device = None if origin is None else self._run.devices[origin]
        if source_device == home or (isinstance(x, Tensor) and x.device == home):
            return x, None

        def moves(tensor: Tensor) -> bool:
            return tensor.device == source_device if source_device else tensor.device != home

        tensors, rebuild = select(x, moves)
        if not tensors:
            return x, None
        # Tensors on one device are copied together, but those in the graph apart from the others.
        groups: dict[tuple[torch.device, bool], list[int]] = {}
        for k, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, self.transport.in_graph(tensor)), []).append(k)
        target = self.stream(i)
        results = list(tensors)
        for (device, _), places in groups.items():
            source = self._run.streams.get(device, i)
            if source is not None:
                self._run.sources[device, i] = source
            moving = tuple([tensors[k] for k in places])
            if origin is None and source is not None:  # no stage has made this copy stream wait
                compute = streams.compute_stream(device)
                moving = self.transport.wait(i, moving, source, compute)
            moved = self.transport.copy(i, moving, source, target, origin)
            for k, tensor in zip(places, moved, strict=True):
                results[k] = tensor
        return rebuild(tuple(results)), target

    def let_others_copy(self, i: int) -> None:
        """Make the copy stream of micro-batch ``i`` wait for what this stage has computed."""
        if self.go_out or self.come_in:
            copying = self.stream(i)
            if copying is not None:
                streams.wait(copying, streams.compute_stream(self._device))
