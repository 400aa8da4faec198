"""Checkpoint and Recompute: the paper's pair with shared memory (section 3.2.4), non-reentrant.

The standard way to checkpoint is one autograd function that runs the forward without grad and, in
its backward, runs it again and calls ``backward`` inside. That ties recomputation to
back-propagation, but the pipeline needs ``R[i,j]`` to run while ``dy`` is still in transit, and
``B[i,j]`` afterwards. The paper splits the function in two that share memory; but with the inner
``backward``, ``autograd.grad``, ``retain_graph``, DDP and frozen layers still behave differently.

Here there is no inner ``backward``. Rules:

1. ``F[i,j]`` runs with grad enabled under saved-tensor hooks that keep a :class:`_Slot` in place of
   each saved tensor. So the graph of ``B[i,j]`` is the ordinary one, without its data.
2. :func:`recompute_before` puts one node behind the partition's output. Its backward runs the
   partition again under hooks that fill the slots in creation order, and passes
   the gradients on. Nothing else lies between the arrival of ``dy`` and ``B[i,j]``, so the wait
   for a copy of ``dy`` goes right below this node.
3. An operation of ``B[i,j]`` that reads its slot empties it: an activation lives no longer than
   without checkpointing. Reading an empty slot recomputes on the spot: this happens in a graph
   entered past the node of rule 2, or when an operation reads twice.
4. The shared memory, :class:`Checkpoint`, is owned by its slots alone, and through them by the
   graph. Autograd drops the slots when the backward is over, and the saved inputs with them.
   When no slot is left there is nothing to recompute, and the node does nothing.
5. The inputs are kept as they were before the partition ran: the partition gets a copy, so that an
   in-place first layer cannot corrupt them. If anything else has changed them they are refused, as
   autograd does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.autograd.function import applied
from pipert.autograd.inputs import Inputs
from pipert.batch.tensors import describe, tensors_of
from pipert.errors import NestedCheckpointError, RecomputationError

__all__: list[str] = []

Hook = Callable[[Any], Any]
Replay = Callable[[Callable[[], Value], Callable[[Value], None], bool], None]


class _Slot:
    """Placeholder for one saved tensor: its shape and dtype, and its value from R to B."""

    __slots__ = ("__weakref__", "checkpoint", "dtype", "full", "shape", "value", "version")

    def __init__(self, checkpoint: Checkpoint, tensor: Tensor) -> None:
        self.checkpoint = checkpoint
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.version = 0
        self.full = False
        self.value: Any = None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def fill(self, tensor: Tensor) -> None:
        hooks = self.checkpoint.hooks
        self.value = tensor if hooks is None else hooks[0](tensor)
        self.version = tensor._version
        self.full = True

    def take(self) -> Tensor:
        if not self.full:
            if self.checkpoint.recording:
                refuse()
            self.checkpoint.recompute()
        value, self.value, self.full = self.value, None, False
        hooks = self.checkpoint.hooks
        if hooks is not None:
            return hooks[1](value)  # type: ignore[no-any-return]
        tensor: Tensor = value
        if tensor._version != self.version:
            raise RuntimeError(
                f"a tensor needed for gradient computation, {self}, was modified in place by a "
                "later operation of the same partition; clone it there"
            )
        return tensor


class Checkpoint:
    """The shared memory of one checkpointed task: its inputs and its slots.

    Args:
        replay: puts on the context of the first time, grad enabled included, asks the first
            function it is given for the input value, computes the task again with the same random
            numbers, and calls the second; the flag says whether it is on a worker. It must
            reference no run and no thread.
        value: the input, any pytree.
        hooks: the saved-tensor hooks ``(pack, unpack)`` of the caller; they receive what is
            recomputed, as they would receive what is saved without checkpointing.
    """

    __slots__ = ("__weakref__", "_inputs", "_replay", "hooks", "recording", "slots")

    def __init__(
        self,
        replay: Replay,
        value: Value,
        hooks: tuple[Hook, Hook] | None,
    ) -> None:
        self._replay = replay
        self._inputs = Inputs(value)
        self.slots: list[weakref.ref[_Slot]] = []
        self.hooks = hooks
        self.recording = False

    def record(self, compute: Callable[[Value], Value], value: Value) -> Value:
        """Run ``compute(value)`` with each saved tensor replaced by a slot (rules 1 and 5)."""
        tensors, rebuild = tensors_of(value)
        own = rebuild(tuple(map(Tensor.clone, tensors)))
        self.recording = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(_Keep(self), _Slot.take):
                return compute(own)
        finally:
            self.recording = False

    def recompute(self) -> None:
        """Run the task again and fill the slots that are still there."""
        fill = _Fill(self)
        with torch.autograd.graph.saved_tensors_hooks(fill, _never_read):
            self._replay(self._inputs.fresh, fill.check, False)

    def __repr__(self) -> str:
        return f"<Checkpoint of {self._inputs!r}, {len(self.slots)} slots>"


class _Keep:
    """Replaces what ``F[i,j]`` saves by slots."""

    __slots__ = ("checkpoint",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __call__(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self.checkpoint, tensor)
        self.checkpoint.slots.append(weakref.ref(slot))
        return slot


class _Fill:
    """Fills the slots, in creation order, with what ``R[i,j]`` saves."""

    __slots__ = ("checkpoint", "filled")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.filled = 0

    def __call__(self, tensor: Tensor) -> None:
        slots = self.checkpoint.slots
        if self.filled == len(slots):
            raise RecomputationError(
                f"a recomputation saved {describe(tensor)} where its forward saved nothing more"
                + REMEDY
            )
        slot = slots[self.filled]()
        self.filled += 1
        if slot is None:
            return  # never read again
        if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
            raise RecomputationError(
                f"a recomputation saved {describe(tensor)} where its forward saved {slot}" + REMEDY
            )
        slot.fill(tensor.detach())

    def check(self, _: Value) -> None:
        """Refuse a recomputation that ended too early."""
        slots = self.checkpoint.slots
        if self.filled < len(slots):
            raise RecomputationError(
                f"a recomputation saved {self.filled} tensors and its forward {len(slots)}{REMEDY}"
            )


class Forget(partial[int]):
    """Replaces what is saved by a number: ``Forget(next, count())``, which is as fast as a hook is.

    Attributes:
        hooks: the saved-tensor hooks of the caller.
    """

    hooks: tuple[Hook, Hook] | None


def refuse(_: Any = None) -> Tensor:
    """Refuse to read what was not saved."""
    raise RecomputationError(
        "a layer ran a backward through itself in its forward, which cannot be done "
        "while its activations are not kept; use checkpoint='never'"
    )


def hooks_of_caller() -> tuple[Hook, Hook] | None:
    """Returns the user's innermost saved-tensor hooks, skipping those of this file.

    A run that a layer starts in ``F[i,j]`` or ``R[i,j]`` adopts the user's hooks. Ours belong
    to this task alone: the other run's threads would mix up their order, so its graph is kept
    unchanged. The same holds for the hooks of torch's checkpoint, which are refused.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    pack: Any = hooks[0]
    if isinstance(pack, _Keep | _Fill):
        return pack.checkpoint.hooks
    if isinstance(pack, Forget):
        return pack.hooks
    if getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__:
        raise NestedCheckpointError(
            "a pipe was called inside torch.utils.checkpoint, which tells saved tensors apart by "
            "their order; several threads save in no fixed one. Use the pipe's own checkpoint="
            "'always', or use_reentrant=True"
        )
    found: tuple[Hook, Hook] = hooks
    return found


REMEDY = (
    "; layers must do the same when they run again: no counters, no random numbers from a "
    "generator of their own, no dependence on what the training loop changes. Otherwise use "
    "checkpoint='never'"
)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, checkpoint: weakref.ref[Checkpoint], *ys: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.checkpoint = checkpoint
        return tuple(map(Tensor.detach, ys))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        checkpoint = ctx.checkpoint()
        if checkpoint is not None and any(grad is not None for grad in grads):
            checkpoint.recompute()
        return (None, *grads)


_apply_recompute = applied(_Recompute)


def recompute_before(ys: Tensors, checkpoint: Checkpoint) -> Tensors:
    """Make the backward of ``ys``, all differentiable, recompute first (rules 2 and 4)."""
    weak = weakref.ref(checkpoint)
    outputs: Tensors = _apply_recompute(weak, *ys)
    return outputs


def _never_read(_: Any) -> Tensor:
    raise AssertionError("the graph of a recomputation is never run backward")
