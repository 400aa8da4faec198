"""Brings values to a stage from other devices: which tensors are copied, when, and how.

In a call, copies and waits are nodes whose backward does the same in the opposite direction
(section 3.2.3 of the paper). In a step the graph ends at the borders of a stage, and ``B[i,j]``
copies the gradients and waits for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.autograd import streams, transfer
from pipert.autograd.transfer import Stream
from pipert.batch.tensors import differentiable, select
from pipert.observe.event import COPY, WAIT
from pipert.stage.run import Run
from pipert.workers.context import NOTHING


class Copies:
    """The copies to the device of stage *j*. Used by its worker only."""

    def __init__(
        self, run: Run, j: int, has_skips: bool, is_cut: bool, from_any: bool = False
    ) -> None:
        self._run = run
        self._j = j
        self._device = run.devices[j]
        self._is_cut = is_cut  # as in a step: copies of what requires grad require grad as well
        self._trace = run.trace if run.trace.is_recorded else None
        self.previous = j - 1 if j > 0 else None
        """The partition that the input comes from; ``None`` for the caller."""
        sources, readers = run.devices if from_any else run.devices[:j], run.devices[j + 1 :]
        if not has_skips:
            sources, readers = sources if from_any else sources[-1:], readers[:1]
        # Whether values may come from other devices, and whether others may copy from here.
        self.come_in = j == 0 or any([device != self._device for device in sources])
        self.go_out = any([device != self._device for device in readers])

    def stream(self, i: int) -> Stream:
        """Return the copy stream of micro-batch ``i`` on this device; ``None`` on CPU."""
        return self._run.streams.get(self._device, i)

    def bring(self, i: int, x: Value, origin: int | None) -> Value:
        """Copy a value here from partition ``origin``, or the caller; let compute wait for that."""
        x, copied = self.copy(i, x, origin)
        return x if copied is None else self.wait(i, x, copied)

    def wait(self, i: int, x: Value, copied: Stream) -> Value:
        """Make the compute stream wait for the copy; in the backward, the copy for compute."""
        return self.order(i, x, streams.compute_stream(self._device), copied)

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
            groups.setdefault((tensor.device, self._in_graph(tensor)), []).append(k)
        target = self.stream(i)
        results = list(tensors)
        for (device, _), places in groups.items():
            source = self._run.streams.get(device, i)
            if source is not None:
                self._run.sources[device, i] = source
            moving = tuple([tensors[k] for k in places])
            if origin is None and source is not None:  # no stage has made this copy stream wait
                compute = streams.compute_stream(device)
                moving = self.order(i, moving, source, compute)
            moved = self._move(i, moving, source, target, origin)
            for k, tensor in zip(places, moved, strict=True):
                results[k] = tensor
        return rebuild(tuple(results)), target

    def _in_graph(self, tensor: Tensor) -> bool:
        """Return whether a gradient of ``tensor`` will have to be brought back."""
        return tensor.requires_grad and (self._is_cut or torch.is_grad_enabled())

    def _move(
        self, i: int, tensors: Tensors, source: Stream, target: Stream, origin: int | None
    ) -> Tensors:
        """Copy ``tensors``, which are all on one device, and either all in the graph or all not.

        They are read on stream ``source``; the copies are written on stream ``target``.
        """
        trace, home, j, copying = self._trace, tensors[0].device, self._j, NOTHING
        here, there, size = (self._device, target), (home, source), 0
        if trace is not None:
            size = sum([tensor.nbytes for tensor in tensors])
            event = COPY, i, j, self._device, *self._timed_by(there, here)
            copying = trace.during(*event, source=home, origin=origin, bytes=size)
        with copying:
            if self._in_graph(tensors[0]) and not self._is_cut:
                to_caller = origin is None
                moved = transfer.copy(i, tensors, self._device, source, target, to_caller)
            else:
                plain = tuple([tensor.detach() for tensor in tensors])
                moved = streams.copy(plain, self._device, source, target)
        for old, new in zip(tensors, moved, strict=True) if self._is_cut else ():
            new.requires_grad_(old.requires_grad)
        if trace is not None:
            event = COPY, i, j if origin is None else origin, home, *self._timed_by(here, there)
            node = moved[0].grad_fn  # which copies the gradient back
            trace.watch_node(node, *event, source=self._device, origin=j, bytes=size)
        return moved

    def order(self, i: int, x: Value, waiter: Stream, awaited: Stream) -> Value:
        """Make stream ``waiter`` wait for ``awaited`` before it reads ``x``; return ``x``."""
        trace, compute = self._trace, streams.compute_stream(self._device)
        is_in_graph = torch.is_grad_enabled() and not self._is_cut
        event = WAIT, i, self._j, self._device
        with trace.during(*event) if trace is not None and waiter == compute else NOTHING:
            xs, rebuild = differentiable(x if is_in_graph else None)
            if xs:
                x = rebuild(transfer.wait(xs, waiter, awaited))
            else:
                streams.wait(waiter, awaited)
        if trace is not None and is_in_graph and waiter != compute == awaited:
            for tensor in differentiable(x)[0][:1]:  # in the backward compute waits for a gradient
                trace.watch_node(tensor.grad_fn, *event)
        return x

    def let_others_copy(self, i: int) -> None:
        """Make the copy stream of micro-batch ``i`` wait for what this stage has computed."""
        if self.go_out or self.come_in:
            copying = self.stream(i)
            if copying is not None:
                streams.wait(copying, streams.compute_stream(self._device))

    def _timed_by(self, *sides: tuple[torch.device, Stream]) -> tuple[torch.device, Stream]:
        """Return the clock and the stream that time a copy: those of the first side on CUDA.

        A recording knows the clocks of the pipe's devices, not of all that the caller uses.
        """
        for device, stream in sides:
            if stream is not None and device in self._run.devices:
                return device, stream
        return torch.device("cpu"), None
