"""Copies tensors to the device of the partition that uses them.

A tensor that partition *j* uses, and that is on the device of another partition *k*, is copied once
for partition *j*, over the copy streams of both devices (section 3.2.3 of the paper):

* In a call the copy is part of the graph. In the backward, ``B[i,k]`` begins after the gradient has
  been copied back, so a fork there takes the turn of the micro-batch (``autograd.order``).
* If *k* is the partition before, it recomputes first, while the gradient is still being copied. A
  tensor that skips partitions triggers no recomputation: its gradient may arrive long before.
* When a partition ends, the copy stream of its device waits for what it has computed, so a copy
  waits for that and not for what the device computes later.

Parameters are copied once per run and partition (``parameter_copies``). A tensor that is on no
device of the pipe, such as lengths on the CPU, stays there.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from pipert._torch import node_count, sequence_nr
from pipert._typing import Value
from pipert.autograd import order, streams, transfer
from pipert.batch.tensors import tensors_of
from pipert.recompute.nodes import recompute_before
from pipert.recompute.segment import Segments
from pipert.stage.run import Run
from pipert.stage.stage import Stage


class TensorCopies:
    """Copies tensors of micro-batch ``i`` to the device of the current partition."""

    def __init__(self, i: int, run: Run) -> None:
        self._i = i
        self._run = run
        self._devices = list(dict.fromkeys(run.devices))
        self._stage: Stage
        self._start = 0
        self._nodes_before = range(0)  # the numbers of the nodes of the partition before
        self._segments_before: weakref.ref[Segments] | None = None  # of the partition before

    def begin(self, stage: Stage) -> None:
        """Begin a partition."""
        self._stage = stage
        self._nodes_before, self._start = range(self._start, node_count()), node_count()

    def end(self, segments: Segments | None) -> None:
        """End the partition, whose calls of layers may have been checkpointed."""
        self._segments_before = None if segments is None else weakref.ref(segments)
        if len(self._devices) > 1:
            self._stage.boundary.copies.let_others_copy(self._i)

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the device of another partition, to be copied here."""
        device = tensor.device
        if device == self._stage.place.device or device not in self._devices:
            return False
        # 0-dimensional CPU tensors, such as a length, work with tensors of any device.
        return device.type != "cpu" or tensor.dim() > 0

    def enter_inputs(self, x: Value) -> Value:
        """Bring the inputs of the model to its first device."""
        with torch.enable_grad():
            return self._stage.boundary.copies.bring(self._i, x, None)

    def copy(self, tensor: Tensor, is_cut: bool) -> Tensor:
        """Return a copy of ``tensor``, without a graph if the graph ``is_cut`` there."""
        if is_cut:
            tensor = tensor.detach()
        elif tensor.requires_grad and self._stage.step_boundary is not None:
            # No partition has made it.
            return tensor.to(self._stage.place.device)
        elif tensor.requires_grad:
            tensor = self._order_backward(tensor)
        origin = self._run.devices.index(tensor.device)
        (moved,) = self._stage.boundary.copies.bring(self._i, (tensor,), origin)
        found: Tensor = moved
        return found

    def settle(self, value: Value) -> None:
        """Let other partitions copy tensors that this one has made on another device."""
        for tensor in tensors_of(value)[0]:
            if self.is_elsewhere(tensor):
                source = self._run.streams.get(tensor.device, self._i)
                streams.wait(source, streams.compute_stream(tensor.device))

    def _order_backward(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` behind nodes that order the backward around the copy's."""
        copying = self._run.streams.get(tensor.device, self._i)
        compute = streams.compute_stream(tensor.device)
        number = -1 if tensor.grad_fn is None else sequence_nr(tensor.grad_fn)
        (tensor,) = transfer.wait_back((tensor,), copying, compute)
        segments = None if self._segments_before is None else self._segments_before()
        # A node of another thread, which a model has kept, would at most recompute early.
        if segments is not None and number in self._nodes_before:
            (tensor,) = recompute_before((tensor,), segments)
        # In the backward the fork comes first, so nothing waits for a gradient before its turn.
        _, tensor = order.fork(self._i, None, tensor)
        return tensor
