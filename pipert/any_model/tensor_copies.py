"""Copies tensors to the device of the partition that uses them.

A tensor that partition *j* uses, and that is on the device of another partition
*k*, is copied once for partition *j*, over the copy streams of both devices (section 3.2.3 of the
paper):

* In a call the copy is part of the graph. In the backward, ``B[i,k]`` begins after the gradient has
  been copied back, so a fork there takes the turn of the micro-batch (``autograd.order``).
* If *k* is the partition before, it recomputes first, while the gradient is still being copied. A
  tensor that skips partitions triggers no recomputation: its gradient may arrive long before.
* When a partition ends, the copy stream of its device waits for what it has computed, so a copy
  waits for that and not for what the device computes later.
* Parameters are copied once per run and partition, like tied weights.

A tensor that is on no device of the pipe, such as lengths on the CPU, stays there.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert._torch import node_count, sequence_nr
from pipert._typing import Value
from pipert.any_model.checkpointed_calls import CheckpointedCalls
from pipert.any_model.func_transforms import outside_of_transforms, refuse_to_move
from pipert.any_model.hooks_on_arguments import GradientHooks, hooks_for
from pipert.any_model.parameter_copies import ParameterCopies
from pipert.autograd import order, streams, transfer
from pipert.autograd.checkpoint import Checkpoint, recompute_before
from pipert.batch.tensors import tensors_of, version
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.workers.context import is_transformed

__all__: list[str] = []


class _TensorCopy(NamedTuple):
    """A copy, and the versions that it and its original had when it was made."""

    tensor: Tensor
    copy: Tensor
    tensor_version: int
    copy_version: int

    def has_changed(self) -> bool:
        return version(self.copy) != self.copy_version


class TensorCopies:
    """Brings tensors of micro-batch ``i`` to the device of the current partition."""

    def __init__(self, i: int, run: Run, parameter_copies: ParameterCopies) -> None:
        self._i = i
        self._run = run
        self._devices = list(dict.fromkeys(run.devices))
        self._parameter_copies = parameter_copies
        self._copies: dict[int, _TensorCopy] = {}  # the partition's, by the id of the original
        self._changed: dict[int, _TensorCopy] = {}  # copies that earlier partitions have changed
        self._hooks: list[GradientHooks] = []  # of the copies
        self._stage: Stage
        self._start = 0
        self._nodes_before = range(0)  # the numbers of the nodes of the partition before
        self._calls: CheckpointedCalls | None = None  # of the current partition
        self._checkpoint_before: weakref.ref[Checkpoint] | None = None  # of the partition before

    def begin(self, stage: Stage, calls: CheckpointedCalls | None) -> None:
        """Begin a partition whose calls of layers are recorded on ``calls``."""
        self._stage = stage
        self._nodes_before, self._start = range(self._start, node_count()), node_count()
        self._calls = calls

    def end(self) -> None:
        """End the partition. A copy that it has changed in place replaces its tensor for good."""
        self._changed.update((k, copy) for k, copy in self._copies.items() if copy.has_changed())
        for hooks in self._hooks:
            hooks.tie()
        self._hooks.clear()
        self._copies.clear()
        first = None if self._calls is None else self._calls.first()
        self._checkpoint_before = None if first is None else weakref.ref(first)
        self._calls = None
        if len(self._devices) > 1:
            self._stage.ends.copies.let_others_copy(self._i)

    def current(self, tensor: Tensor) -> Tensor:
        """Return the copy that replaces ``tensor`` since an earlier partition has changed it."""
        while (changed := self._changed.get(id(tensor))) is not None:
            tensor = changed.copy
        return tensor

    def latest(self, tensor: Tensor) -> Tensor:
        """Like :meth:`current`, but for changes by the current partition as well."""
        tensor = self.current(tensor)
        known = self._copies.get(id(tensor))
        return known.copy if known is not None and known.has_changed() else tensor

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
            return self._wait_for(*self._stage.ends.copies.bring(self._i, x, None))

    def bring(self, tensor: Tensor) -> Tensor:
        """Return the partition's copy of ``tensor`` on its device; in a step, detached."""
        if isinstance(tensor, nn.Parameter):
            return self._parameter_copies.copy_of(self._stage, self._i, tensor)
        known = self._copies.get(id(tensor))
        if known is not None and known.tensor_version == version(tensor):
            return known.copy
        if is_transformed():
            refuse_to_move(tensor)
            with outside_of_transforms():
                return self.bring(tensor)
        # Enables gradients: the model may use the copy again in a block that enables them.
        with torch.inference_mode(tensor.is_inference()):
            moved = self._copy(tensor)
        if moved.requires_grad:
            self._hooks.append(hooks_for(tensor))
            self._hooks[-1].give(moved)
        self._copies[id(tensor)] = _TensorCopy(tensor, moved, version(tensor), version(moved))
        return moved

    def bring_in_graph(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor``, which no earlier partition made, to this device by ``Tensor.to``."""
        refuse_to_move(tensor)
        return tensor.to(self._stage.place.device)

    def settle(self, value: Value) -> None:
        """Let other partitions copy tensors that this one has made on another device."""
        for tensor in tensors_of(value)[0]:
            if self.is_elsewhere(tensor):
                source = self._run.streams.get(tensor.device, self._i)
                streams.wait(source, streams.compute_stream(tensor.device))

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._stage.cut is not None:
            tensor = tensor.detach()
        elif tensor.requires_grad:
            copying = self._run.streams.get(tensor.device, self._i)
            compute = streams.compute_stream(tensor.device)
            number = -1 if tensor.grad_fn is None else sequence_nr(tensor.grad_fn)
            (tensor,) = transfer.wait_back((tensor,), copying, compute)
            first = None if self._checkpoint_before is None else self._checkpoint_before()
            # A node of another thread, which a model has kept, would at most recompute early.
            if first is not None and number in self._nodes_before:
                (tensor,) = recompute_before((tensor,), first)
            # In the backward the fork comes first, so nothing waits for a gradient before its turn.
            _, tensor = order.fork(self._i, None, tensor)
        origin = self._run.devices.index(tensor.device)
        (moved,) = self._wait_for(*self._stage.ends.copies.bring(self._i, (tensor,), origin))
        found: Tensor = moved
        return found

    def _wait_for(self, value: Value, copied: Any) -> Value:
        if copied is None:
            return value
        compute = streams.compute_stream(self._stage.place.device)
        return self._stage.ends.copies.transport.wait(self._i, value, compute, copied)
