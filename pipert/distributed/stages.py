"""Computes one partition in a mini-batch that torch's schedules run.

torch's stage (``distributed/torch_stage.py``) calls a module with the tensors that arrived, sends
the tensors it returns, and goes backward through it. That module is a :class:`StageModule` with the
partition's layers, which forwards the call to :class:`Running`, the partition in the current
mini-batch. As in one process, layers get random numbers of their own, and are recomputed by the
paper's pair of functions.

After a failure the schedule goes on with zeros instead of calling layers, so that no rank waits for
a message that never comes. When all ranks have finished the schedule, all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.checkpoint import Checkpoint
from pipert.autograd.recompute import Recomputation
from pipert.batch.tensors import Carried, differentiable, tensors_of
from pipert.distributed.boundary import Boundary
from pipert.distributed.gradients import Gradients
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.call import AfterLayer, Layers
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.observe.notifier import Notifier
from pipert.schedules.action import BACKWARD, FORWARD, Action
from pipert.skip.routes import PartitionSkips
from pipert.stage.loss import Loss
from pipert.stage.shared_memory import Shared, compute_watching
from pipert.stage.step_boundary import detached
from pipert.workers.context import NOTHING, CallerContext

__all__: list[str] = []


class StageModule(nn.Sequential):
    """The layers of a partition under the plain module's names: the module to wrap for DDP.

    Its forward takes the tensors that arrive and returns those that leave. Only a pipe calls it.
    """

    forward_micro_batch: Callable[[Tensors], Any] | None = None
    """Computes a micro-batch; set while a mini-batch runs."""

    def forward(self, *tensors: Tensor) -> Any:
        """Compute one micro-batch of the current mini-batch."""
        if self.forward_micro_batch is None:
            raise RuntimeError(
                "a partition of pipert.distributed.Pipe is called by the pipe alone; call the "
                "pipe, or the partition's layers"
            )
        return self.forward_micro_batch(tensors)


@dataclass(eq=False)
class MiniBatch:
    """The state of one mini-batch that this rank's partitions share."""

    sizes: Sequence[int]
    """The number of rows in each micro-batch."""
    recomputed: int
    """The number of micro-batches, counted from the first, whose layers are recomputed."""
    seed: RunSeed
    notifier: Notifier
    context: CallerContext
    loss: Loss | None
    """The loss of a step; only on the rank of the last partition."""
    keep_outputs: bool
    is_wrapped: bool
    """Whether a module around a partition must see each backward, as DDP must."""
    is_sharded: bool
    """Whether layers communicate with other replicas, as after ``fully_shard``; then an error ends
    the mini-batch at once."""
    outputs: dict[int, Value] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: Gradients | None = None
    """Set in a step, unless layers are sharded: they compute with other parameters."""
    failure: tuple[BaseException, Action | None] | None = None
    """The first error on this rank, and the action that raised it."""
    last: Action | None = None
    """The action that began last."""

    def at(self) -> str:
        """Say where this rank is, for an error."""
        return "before its first action" if self.last is None else f"at {self.last}"

    def fail(self, error: BaseException, action: Action | None) -> None:
        """Note an error, unless an earlier one was noted."""
        self.failure = self.failure or (error, action)

    def take_failure(self) -> tuple[BaseException, Action | None] | tuple[()]:
        """Return the failure and forget it, so that no reference cycle keeps its frames alive."""
        failure, self.failure = self.failure, None
        return failure or ()


@dataclass(eq=False)
class Running:
    """One partition in one mini-batch."""

    module: StageModule
    called: nn.Module
    """The module that torch's stage calls: ``module``, or the wrapper around it."""
    place: Place
    layers: Layers
    batch: MiniBatch
    skips: PartitionSkips
    inputs: Sequence[Value]
    """The input of each micro-batch; used by the first partition."""
    stats: PartitionStats | None
    arriving: Boundary | None = None
    """The boundary before the partition; ``None`` for the first."""
    leaving: Boundary | None = None
    """The boundary behind the partition; ``None`` for the last."""
    i: int = 0
    """The micro-batch that torch's stage computes now."""
    backwards: int = 0
    """The number of micro-batches whose backward has begun."""

    def forward(self, tensors: Tensors) -> Tensor | Tensors:
        """Compute ``F`` of the current micro-batch; return the tensors to send, or the loss."""
        action = Action(FORWARD, self.i, self.place.j)
        if self.batch.failure is None:
            try:
                return self.batch.context.variables.copy().run(self._forward, action, tensors)
            except BaseException as error:  # noqa: B036  raised when all ranks have finished
                self._fail(error, action)
                if self.batch.is_sharded:
                    raise
        return self._zeros(tensors)

    def _forward(self, action: Action, tensors: Tensors) -> Tensor | Tensors:
        i = action.i
        shared: Shared = {}
        if self.arriving is None:
            x = moved(self.inputs[i], self.place.device)
        else:
            x = entered(self.arriving.unpack(i, tensors))
            shared = self.arriving.shared(i)
        with self._observed(action) as after_layer:
            with NOTHING if self.stats is None else self.stats.collecting():
                recomputed = i < self.batch.recomputed
                compute = partial(self.compute, i, checkpointed=recomputed, after_layer=after_layer)
                # Which tensors share memory behind it was found when the ranks met this shape.
                y = compute_watching(shared, lambda _: None, compute, x) if shared else compute(x)
            if self.leaving is not None:
                left = self.leaving.pack(i, y)
            else:
                left = self._compute_loss(i, y.value if isinstance(y, Carried) else y)
            if i == 0 and self.batch.gradients is not None:
                xs = tensors_of(self.inputs[0])[0] if self.arriving is None else tensors
                self.batch.gradients.put_aside_other_leaves(left, xs)
            return left if self.leaving is not None else left[0]

    def _compute_loss(self, i: int, y: Value) -> Tensors:
        """Keep the output of the last partition; return its loss, or zero in an evaluation."""
        batch, device = self.batch, self.place.device
        result = torch.zeros(1, device=device)
        if batch.loss is not None:
            target = moved(batch.loss.targets[i], device)
            result = batch.loss.compute(i, self.place, batch.seed, y, target).reshape(1)
            batch.losses[i] = batch.loss.share_of(i, result.detach())
        if batch.keep_outputs:
            batch.outputs[i] = detached(y)
        return (result,)

    def compute(
        self, i: int, x: Value, checkpointed: bool, after_layer: AfterLayer = None
    ) -> Value:
        """Call the layers with ``x``, the input of micro-batch ``i``."""
        if isinstance(x, Carried) != bool(self.skips):  # skips begin here, or ended before
            x = Carried(x, ()) if self.skips else x.value
        compute: Callable[[Value], Value]
        compute = partial(self.layers.forward, i, checkpointed, after_layer)
        if checkpointed:
            replay = partial(self.layers.recompute, i)
            compute = partial(Checkpoint(Recomputation(replay, None)).record, compute)
        return compute(x)

    def backward(self, i: int, go_back: Callable[[], None]) -> bool:
        """Compute ``B`` of a micro-batch by ``go_back()``; return whether it was computed."""
        action = Action(BACKWARD, i, self.place.j)
        if self.batch.failure is not None and not self.batch.is_wrapped:
            return False
        try:
            with self._observed(action):
                self.layers.backward(i, go_back)
            return True
        except BaseException as error:
            self._fail(error, action)
            if self.batch.is_wrapped or self.batch.is_sharded:
                raise
            return False

    def _fail(self, error: BaseException, action: Action) -> None:
        cause = error.__cause__
        # The type comes first, since str() of other errors may fail.
        if type(error) is RuntimeError and cause is not None and _TORCHS_ERROR in str(error):
            error = cause
        self.place.note(error, action)
        if self.batch.failure is None:
            self.batch.notifier.failed(action, self.place.device, error)
        self.batch.fail(error, action)

    def _zeros(self, tensors: Tensors) -> Tensor | Tensors:
        """Return zeros as output, computed from all tensors for which a gradient is expected."""
        device = self.place.device
        leaves = [t for t in (*tensors, *self.module.parameters()) if t.requires_grad]
        zero = sum((t.reshape(-1)[:1].sum() * 0.0 for t in leaves), torch.zeros((), device=device))
        if self.leaving is None:
            return zero.reshape(1)
        return tuple([zero.to(t.dtype).expand(t.shape).contiguous() if t.requires_grad
                      else torch.zeros_like(t, device=device)
                      for t in self.leaving.metas])  # fmt: skip

    @contextmanager
    def _observed(self, action: Action) -> Iterator[AfterLayer]:
        """Compute ``action`` in the block, seen by recordings and observers."""
        self.batch.last = action
        notifier = self.batch.notifier
        with notifier.watched(action, self.place.device) as span:
            yield notifier.recorder.after_layer(span) if notifier.recorder and span else None


# torch wraps each error of a backward in one that prints all of its inputs, which may be long.
_TORCHS_ERROR = "Failed to run stage backward"


def moved(value: Value, device: torch.device, copy: bool = False) -> Value:
    """Return the value on a device; as a copy, it shares no memory with the original."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([tensor.to(device, copy=copy) for tensor in tensors]))


def entered(x: Value) -> Value:
    """Pass the leaves of ``x`` through an operation, since no layer may change a leaf in place."""
    xs, rebuild = differentiable(x)
    return rebuild(order.join(order.ENTRANCE, *xs)) if xs else x
