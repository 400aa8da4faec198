"""Describes one partition, and what partitions of a rank share, in one mini-batch.

torch's stage (``rank_stage``) calls a module with the tensors that arrived, and goes backward
through those that it returns. That module is a :class:`StageModule` with the partition's layers, or
a wrapper around one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipert._typing import Tensors, Value
from pipert.batch.tensors import Carried, tensors_of
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.call import Layers
from pipert.layers.effects import Effects
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.observe.notifier import Notifier
from pipert.schedules.action import Action
from pipert.skip.routes import PartitionSkips
from pipert.stage.loss import Loss
from pipert.workers.context import CallerContext

Compute = Callable[[int, Value], Value]
"""Computes a micro-batch from what has arrived, or is its input."""


class StageModule(nn.Sequential):
    """The layers of a partition under the plain module's names: the module to wrap for DDP.

    Its forward takes the tensors that arrive and returns those that leave. Only a pipe calls it.
    """

    forward_micro_batch: Callable[[Tensors], Tensors] | None = None
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
class RankBatch:
    """The state of one mini-batch that this rank's partitions share."""

    sizes: Sequence[int]
    """The number of rows in each micro-batch."""
    inputs: Sequence[Value]
    """The input of each micro-batch; a chain has them on its first rank alone."""
    recomputed: int
    """The number of micro-batches, counted from the first, whose layers are recomputed."""
    seed: RunSeed
    notifier: Notifier
    context: CallerContext
    loss: Loss | None
    """The loss of a step; only on the rank of the last partition."""
    keep_outputs: bool
    is_ready: bool
    """Whether the micro-batches came ready, so that their outputs are not joined."""
    is_sharded: bool
    """Whether layers communicate with other replicas, as after ``fully_shard``."""
    outputs: dict[int, Value] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    sent: list[dist.Work | None] = field(default_factory=list)
    """Headers on their way."""
    effects: Effects = field(default_factory=partial(Effects, at_end=True))
    failure: tuple[BaseException, Action | None] | None = None
    """The first error on this rank, and the action that raised it."""
    records: list[Any] = field(default_factory=list)
    """For each micro-batch of any model, its :class:`.Record`, or ``None`` if there is none."""
    is_failed: bool = False
    """Whether this rank has failed, or one before it."""
    last: Action | None = None
    """The action that began last."""

    def at(self) -> str:
        """Say where this rank is, for an error."""
        return "before its first action" if self.last is None else f"at {self.last}"

    def fail(self, error: BaseException, action: Action | None) -> None:
        """Note an error, unless an earlier one was noted."""
        self.failure, self.is_failed = self.failure or (error, action), True

    def take_failure(self) -> tuple[BaseException, Action | None] | tuple[()]:
        """Return the failure and forget it, so that no reference cycle keeps its frames alive."""
        failure, self.failure = self.failure, None
        return failure or ()


def compute_chain(
    layers: Layers, skips: PartitionSkips, recomputed: int, i: int, x: Value
) -> Value:
    """Call the layers of an ``nn.Sequential``, of which the first micro-batches are recomputed."""
    if isinstance(x, Carried) != bool(skips):  # skips begin here, or ended before
        x = Carried(x, ()) if skips else x.value
    segments = layers.segments(i) if i < recomputed else None
    return layers.forward(i, segments, x)


class RankPartition(NamedTuple):
    """One partition in one mini-batch."""

    module: StageModule
    place: Place
    layers: Layers
    compute: Compute
    batch: RankBatch
    stats: PartitionStats | None


def moved(value: Value, device: torch.device) -> Value:
    """Return the value on a device."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([tensor.to(device) for tensor in tensors]))
