"""Computes one partition in a mini-batch that torch's schedules run.

torch's stage (``rank_stage``) calls a module with the tensors that arrived, and goes backward
through those that it returns. That module is a :class:`StageModule` with the partition's layers, or
a wrapper around one. It forwards the call to :class:`RankPartition`, the partition in the current
mini-batch. How it computes, by calling layers one after the other or by a replay of the model's own
forward, is the choice of a :class:`Computing`.

After a failure the schedule goes on without calling layers, so that no rank waits for a message
that never comes. When all ranks have finished the schedule, all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.batch.tensors import Carried, differentiable, tensors_of
from pipert.distributed.rank_boundary import FAILED, Arrived, Parcel, pack
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.call import Layers
from pipert.layers.effects import Effects
from pipert.layers.phase import microbatch
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.observe.notifier import Notifier
from pipert.schedules.action import BACKWARD, FORWARD, Action
from pipert.skip.routes import PartitionSkips
from pipert.stage.loss import Loss
from pipert.stage.shared_memory import Shared, compute_watching
from pipert.stage.step_boundary import detached
from pipert.workers.context import NOTHING, CallerContext


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
    is_wrapped: bool
    """Whether a module around a partition must see each backward, as DDP must."""
    is_sharded: bool
    """Whether layers communicate with other replicas, as after ``fully_shard``."""
    outputs: dict[int, Value] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    sent: list[dist.Work] = field(default_factory=list)
    """Headers on their way."""
    effects: Effects = field(default_factory=partial(Effects, at_end=True))
    failure: tuple[BaseException, Action | None] | None = None
    """The first error on this rank, and the action that raised it."""
    records: list[Any] = field(default_factory=list)
    """For each micro-batch of any model, its :class:`.Record`, or ``None`` while there is none."""
    seen: list[Any] = field(default_factory=list)
    """The replays of micro-batches without a record: which names were made, and used."""
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


class Computing(Protocol):
    """Computes what a partition does between what arrives and what leaves."""

    def forward(self, i: int, x: Value) -> Value:
        """Compute micro-batch ``i`` from what has arrived, or is its input."""

    def backward(self, i: int, go_back: Callable[[], Any]) -> None:
        """Call ``go_back``, which differentiates."""


@dataclass(eq=False)
class ChainComputing:
    """Calls the layers of an ``nn.Sequential``. As in one process, they get random numbers of their
    own, and are recomputed as one segment or several."""

    layers: Layers
    skips: PartitionSkips
    recomputed: int

    def forward(self, i: int, x: Value) -> Value:
        """Call the layers of the partition."""
        if isinstance(x, Carried) != bool(self.skips):  # skips begin here, or ended before
            x = Carried(x, ()) if self.skips else x.value
        segments = self.layers.segments(i) if i < self.recomputed else None
        return self.layers.forward(i, segments, x)

    def backward(self, i: int, go_back: Callable[[], Any]) -> None:
        """Differentiate under the random numbers of the backward."""
        self.layers.backward(i, go_back)


@dataclass(eq=False)
class RankPartition:
    """One partition in one mini-batch."""

    module: StageModule
    place: Place
    computing: Computing
    batch: RankBatch
    stats: PartitionStats | None
    arrived: dict[int, Arrived] = field(default_factory=dict)
    """The values that came from the partition before, by micro-batch."""

    def compute(self, i: int, call: Callable[..., Any]) -> tuple[Tensors, Tensors, Parcel]:
        """Compute ``F`` of a micro-batch by ``call(*tensors)``, which calls the module.

        Returns:
            The tensors that came with grad, those that left, and what is to be sent.
        """
        self._i, self._left = i, dict[str, Any]()
        arrived = self.arrived.get(i)
        self.batch.is_failed |= self.place.j > 0 and arrived is None
        xs = () if arrived is None else arrived.leaves()
        with_grad = tuple([x for x in xs if x.requires_grad])
        ys, parcel = call(*xs), FAILED
        ys = ys if isinstance(ys, tuple) else (ys,)
        if self._left and not self.place.is_last:
            with self._noting_errors(Action(FORWARD, i, self.place.j)):
                parcel = pack(self._left["rebuild"](ys), self._left["handed_on"])
        return with_grad, ys, parcel

    def forward(self, tensors: Tensors) -> Tensors:
        """Call the layers with the tensors that came; return those that leave, or the loss.

        After a failure, return a zero.
        """
        action = Action(FORWARD, self._i, self.place.j)
        if not self.batch.is_failed:
            with self._noting_errors(action, raises=self.batch.is_sharded):
                return self.batch.context.variables.copy().run(self._forward, action, tensors)
        return (self.zero(tensors),)

    def _forward(self, action: Action, tensors: Tensors) -> Tensors:
        i, arrived = action.i, self.arrived.get(action.i)
        if arrived is None:
            x = moved(self.batch.inputs[i], self.place.device)
        else:
            x = _entered(arrived.rebuild(tensors))
        handed_on: Shared = {}
        with self._observed(action):
            with NOTHING if self.stats is None else self.stats.collecting():
                compute = partial(self.computing.forward, i)
                if arrived is not None and arrived.shared:
                    y = compute_watching(arrived.shared, handed_on.update, compute, x)
                else:
                    y = compute(x)
            if self.place.is_last:
                return (self._compute_loss(i, y.value if isinstance(y, Carried) else y),)
            ys, rebuild = tensors_of(y)
            self._left.update(rebuild=rebuild, handed_on=handed_on)
            return ys

    def _compute_loss(self, i: int, y: Value) -> Tensor:
        """Keep the output of the last partition; return its loss, or zero in an evaluation."""
        batch, device = self.batch, self.place.device
        result = torch.zeros((), device=device)
        if batch.loss is not None:
            target = moved(batch.loss.targets[i], device)
            result = batch.loss.compute(i, self.place, batch.seed, y, target).reshape(())
            batch.losses[i] = batch.loss.share_of(i, result.detach())
        if batch.keep_outputs:
            batch.outputs[i] = detached(y)
        return result

    def backward(self, i: int, go_back: Callable[[], Any]) -> None:
        """Compute ``B`` of a micro-batch by ``go_back()``, unless anything has failed."""
        action, batch = Action(BACKWARD, i, self.place.j), self.batch
        if batch.is_wrapped or not batch.is_failed:
            with self._noting_errors(action, raises=batch.is_wrapped or batch.is_sharded):
                with self._observed(action):
                    self.computing.backward(i, go_back)

    def zero(self, tensors: Tensors) -> Tensor:
        """Return a zero computed from all tensors for which a gradient is expected."""
        leaves = [t for t in (*tensors, *self.module.parameters()) if t.requires_grad]
        zero = torch.zeros((), device=self.place.device)
        return sum((t.reshape(-1)[:1].sum() * 0.0 for t in leaves), zero)

    @contextmanager
    def _noting_errors(self, action: Action, raises: bool = False) -> Iterator[None]:
        """Keep an error of the block until all ranks have finished.

        It ``raises`` where replicas would wait for a collective that this rank leaves out.
        """
        try:
            yield
        except BaseException as error:  # noqa: B036
            self._fail(error, action)
            if raises:
                raise

    def _fail(self, error: BaseException, action: Action) -> None:
        # The type comes first, since str() of other errors may fail.
        if type(error) is RuntimeError and error.__cause__ and _TORCHS_ERROR in str(error):
            error = error.__cause__
        self.place.note(error, action)
        if self.batch.failure is None:
            self.batch.notifier.failed(action, self.place.device, error)
        self.batch.fail(error, action)

    @contextmanager
    def _observed(self, action: Action) -> Iterator[None]:
        """Compute ``action`` in the block, seen by recordings and observers."""
        self.batch.last = action
        with microbatch(action.i), self.batch.notifier.watched(action, self.place.device):
            yield


# torch wraps each error of a backward in one that prints all of its inputs, which may be long.
_TORCHS_ERROR = "Failed to run stage backward"


def moved(value: Value, device: torch.device) -> Value:
    """Return the value on a device."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([tensor.to(device) for tensor in tensors]))


def _entered(x: Value) -> Value:
    """Pass the leaves of ``x`` through an operation, since no layer may change a leaf in place."""
    xs, rebuild = differentiable(x)
    return rebuild(order.join(order.ENTRANCE, *xs)) if xs else x
