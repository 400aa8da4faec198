"""One partition in a mini-batch that torch's schedules run.

torch's stage (``distributed/torch_stage.py``) calls a module with the tensors that arrived, sends
what it returns, and goes backward through it. The module is a :class:`StageModule` of the
partition's own layers, which hands over to what the current mini-batch is made of,
:class:`Running`: as in one process, layers are called with random numbers of their own and
recomputed by the pair of the paper.

What fails is noted, and the schedule goes on with zeros, computing no layer any more: nobody waits
for what never comes. When all ranks are through, all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.again import Again
from pipert.autograd.checkpoint import Checkpoint
from pipert.batch.tensors import Carried, differentiable, tensors_of
from pipert.distributed.boundary import Boundary
from pipert.distributed.gradients import Gradients
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.call import AfterLayer, Layers
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.schedules.action import BACKWARD, FORWARD, Action
from pipert.seeing.told import Told
from pipert.skip.routes import PartitionSkips
from pipert.stage.cut import detached
from pipert.stage.loss import Loss
from pipert.stage.shared_memory import Shared, compute_watching
from pipert.workers.context import CallerContext

__all__: list[str] = []


class StageModule(nn.Sequential):
    """The layers of a partition under the plain module's names: what data parallelism wraps.

    Its forward takes and returns the tensors that cross, and is called by a pipe.
    """

    forward_micro_batch: Callable[[Tensors], Any] | None = None

    def forward(self, *tensors: Tensor) -> Any:
        """Compute one micro-batch of the mini-batch that is running."""
        if self.forward_micro_batch is None:
            raise RuntimeError(
                "a partition of pipert.distributed.Pipe is called by the pipe alone; call the "
                "pipe, or the partition's layers"
            )
        return self.forward_micro_batch(tensors)


@dataclass(eq=False)
class MiniBatch:
    """What this rank's partitions share in one mini-batch."""

    sizes: Sequence[int]
    """The rows of each micro-batch."""
    recomputed: int
    """How many micro-batches are, from the first."""
    seed: RunSeed
    told: Told
    context: CallerContext
    loss: Loss | None
    """Of a step, on the rank of the last partition."""
    keep_outputs: bool
    is_wrapped: bool
    """Whether what is around a partition must see each backward, as DDP does."""
    is_sharded: bool
    """Whether layers talk to other replicas, as by ``fully_shard``: an error ends it at once."""
    outputs: dict[int, Value] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: Gradients | None = None
    """Of a step, unless layers have other parameters while they compute."""
    failure: tuple[BaseException, Action | None] | None = None
    """The first error here, and what has failed."""
    last: Action | None = None
    """What has begun last."""

    def fail(self, error: BaseException, action: Action | None) -> None:
        """Note an error, unless there is one."""
        self.failure = self.failure or (error, action)

    def take_failure(self) -> tuple[BaseException, Action | None] | tuple[()]:
        """The error, which is forgotten, so that no cycle keeps its frames alive."""
        failure, self.failure = self.failure, None
        return failure or ()


@dataclass(eq=False)
class Running:
    """One partition in one mini-batch."""

    module: StageModule
    called: nn.Module
    """The module, or what is wrapped around it."""
    place: Place
    layers: Layers
    batch: MiniBatch
    skips: PartitionSkips
    inputs: Sequence[Value]
    """Of each micro-batch, on the first partition."""
    stats: PartitionStats | None
    arriving: Boundary | None = None
    """None on the first partition."""
    leaving: Boundary | None = None
    """None on the last."""
    i: int = 0
    """The micro-batch that torch's stage is at."""
    gone_back: int = 0
    """How many micro-batches have."""

    def forward(self, tensors: Tensors) -> Tensor | Tensors:
        """Compute ``F`` of a micro-batch: what torch's stage sends, or the loss."""
        action = Action(FORWARD, self.i, self.place.j)
        if self.batch.failure is None:
            try:
                return self.batch.context.variables.copy().run(self._forward, action, tensors)
            except BaseException as error:  # noqa: B036  raised when all are through
                self._fail(error, action)
                if self.batch.is_sharded:
                    raise
        return self._nothing(tensors)

    def _forward(self, action: Action, tensors: Tensors) -> Tensor | Tensors:
        i, loss = action.i, self.batch.loss
        device = self.place.device
        shared: Shared = {}
        if self.arriving is None:
            x = moved(self.inputs[i], device)
        else:
            x = entered(self.arriving.unpack(i, tensors))
            shared = self.arriving.shared(i)
        with self._doing(action) as after_layer:
            with nullcontext() if self.stats is None else self.stats.collecting():
                recomputed = i < self.batch.recomputed
                compute = partial(self.compute, i, checkpointed=recomputed, after_layer=after_layer)
                # What is handed on has been known since the ranks met this shape.
                y = compute_watching(shared, lambda _: None, compute, x) if shared else compute(x)
            if self.leaving is not None:
                sent = self.leaving.pack(i, y)
                self._find_leaves(i, sent, tensors)
                return sent
            y = y.value if isinstance(y, Carried) else y
            result = torch.zeros(1, device=device)
            if loss is not None:
                number = self.place.number_of_loss(i)
                target = moved(loss.targets[i], device)
                result = loss.compute(i, number, self.batch.seed, y, target).reshape(1)
                self.batch.losses[i] = loss.share_of(i, result.detach())
                self._find_leaves(i, (result,), tensors)
            if self.batch.keep_outputs:
                self.batch.outputs[i] = detached(y)
            return result

    def _find_leaves(self, i: int, ys: Tensors, arrived: Tensors) -> None:
        """Find what the layers train, in the first micro-batch."""
        if i == 0 and self.batch.gradients is not None:
            given = tensors_of(self.inputs[0])[0] if self.arriving is None else arrived
            self.batch.gradients.put_aside_other_leaves(ys, given)

    def compute(
        self, i: int, x: Value, checkpointed: bool, after_layer: AfterLayer = None
    ) -> Value:
        """Call the layers."""
        if isinstance(x, Carried) != bool(self.skips):  # where skips begin, or have ended
            x = Carried(x, ()) if self.skips else x.value
        compute: Callable[[Value], Value]
        compute = partial(self.layers.forward, i, checkpointed, after_layer)
        if checkpointed:
            again = partial(self.layers.recompute, i)
            compute = partial(Checkpoint(Again(again, None)).record, compute)
        return compute(x)

    def backward(self, i: int, go_back: Callable[[], None]) -> bool:
        """Compute ``B`` of a micro-batch, unless something has failed. Whether it was computed."""
        action = Action(BACKWARD, i, self.place.j)
        if self.batch.failure is not None and not self.batch.is_wrapped:
            return False
        try:
            with self._doing(action):
                self.layers.backward(i, go_back)
            return True
        except BaseException as error:
            self._fail(error, action)
            if self.batch.is_wrapped or self.batch.is_sharded:
                raise
            return False

    def _fail(self, error: BaseException, action: Action) -> None:
        cause = error.__cause__
        if type(error) is RuntimeError and cause is not None and _OF_STAGE in str(error):
            error = cause  # str() of other types may fail
        self.place.note(error, action)
        if self.batch.failure is None:
            self.batch.told.failed(action, self.place.device, error)
        self.batch.fail(error, action)

    def _nothing(self, tensors: Tensors) -> Tensor | Tensors:
        """Zeros which depend on all that gradients are expected of."""
        device = self.place.device
        begin = [t for t in (*tensors, *self.module.parameters()) if t.requires_grad]
        zero = sum((t.reshape(-1)[:1].sum() * 0.0 for t in begin), torch.zeros((), device=device))
        if self.leaving is None:
            return zero.reshape(1)
        return tuple([zero.to(t.dtype).expand(t.shape).contiguous() if t.requires_grad
                      else torch.zeros_like(t, device=device)
                      for t in self.leaving.metas])  # fmt: skip

    @contextmanager
    def _doing(self, action: Action) -> Iterator[AfterLayer]:
        told, after_layer = self.batch.told, None
        self.batch.last = action
        with ExitStack() as stack:
            if told.recorder is not None:
                span = stack.enter_context(told.recorded(action, self.place.device))
                after_layer = told.recorder.after_layer(span)
            if told.is_observed:
                stack.enter_context(told.observed(action, self.place.device))
            yield after_layer


_OF_STAGE = "Failed to run stage backward"  # torch's, of what went in, which may be long


def moved(value: Value, device: torch.device, copy: bool = False) -> Value:
    """Returns the value on this rank's device, of tensors of its own if it is to be a copy."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([tensor.to(device, copy=copy) for tensor in tensors]))


def entered(x: Value) -> Value:
    """The same as results of an operation: what arrives are leaves, which no layer may change."""
    xs, rebuild = differentiable(x)
    return rebuild(order.join(order.ENTRANCE, *xs)) if xs else x
