"""Adapts torch's stage, which torch's schedules call, to a partition of a pipe.

torch's stage exchanges tensors of one shape, which it finds out beforehand. This one sends shapes
along (``rank_messages``) and keeps no buffers. Of torch's it uses how wrappers such as DDP are
called.

After a failure the schedule goes on without calling layers, so that no rank waits for a message
that never comes. When all ranks have finished the schedule, all raise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from pipert._typing import Tensors, Value
from pipert.autograd.order import ENTRANCE, join
from pipert.autograd.streams import CopyStreams
from pipert.batch.tensors import differentiable, tensors_of
from pipert.distributed.rank_messages import FAILED, Arrived, Parcel, RankPlace, pack, transfers
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.observe.run_trace import RunTrace
from pipert.recompute.effects import Effects
from pipert.recompute.public import microbatch
from pipert.schedules.action import BACKWARD, FORWARD, Action
from pipert.skip.store import Carried, Key
from pipert.stage.actions import compute
from pipert.stage.shared_memory import Shared
from pipert.stage.step import Step, detached
from pipert.workers.context import CallerContext


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

    m: int
    """The number of micro-batches."""
    sizes: Sequence[int]
    """The number of rows in each; empty if they came ready, so that outputs are not joined."""
    inputs: Sequence[Value]
    """The input of each micro-batch; a chain has them on its first rank alone."""
    recomputed: int
    """The number of micro-batches, counted from the first, whose layers are recomputed."""
    seed: RunSeed
    trace: RunTrace
    context: CallerContext
    step: Step | None
    """The losses of a step; only on the rank of the last partition."""
    is_sharded: bool
    """Whether layers communicate with other replicas, as after ``fully_shard``."""
    outputs: dict[int, Value] = field(default_factory=dict)
    """Those of an evaluation."""
    sent: list[dist.Work | None] = field(default_factory=list)
    """Headers on their way."""
    effects: Effects = field(default_factory=lambda: Effects(True, CopyStreams()))
    failure: tuple[BaseException, Action | None] | None = None
    """The first error on this rank, and the action that raised it."""
    records: list[Any] = field(default_factory=list)
    """For each micro-batch of any model, its :class:`.Record`, or ``None`` if there is none."""
    is_failed: bool = False
    """Whether this rank has failed, or one before it."""

    def fail(self, error: BaseException, action: Action | None) -> None:
        """Note an error, unless an earlier one was noted."""
        self.failure, self.is_failed = self.failure or (error, action), True

    def take_failure(self) -> tuple[BaseException, Action | None] | tuple[()]:
        """Return the failure and forget it, so that no reference cycle keeps its frames alive."""
        failure, self.failure = self.failure, None
        return failure or ()


@dataclass(slots=True, eq=False)
class RankMicroBatch:
    """What a stage keeps of one micro-batch from its forward to its backward.

    What is sent, or is not needed again, is dropped, so that 1F1B keeps no boundary tensors of more
    micro-batches than there are partitions.
    """

    arrived: Arrived | None = None
    """The value that came from the partition before."""
    xs: Tensors = ()
    """Its leaves that came with grad."""
    ys: Tensors = ()
    """Those tensors that left, or the loss, that require grad."""
    header: bytes = FAILED
    tensors: Sequence[Tensor] = ()
    """Those to send, until they are sent."""
    dys: Sequence[Tensor] = ()
    """The gradients of ``ys``."""
    dxs: Sequence[Tensor] = ()
    """The gradients to send back."""


class RankStage(PipelineStage):
    """Partition ``j`` as torch's schedules see it, and as ``stage.actions.compute`` takes it.

    Args:
        module: its layers.
        wrapped: what torch calls; maybe the module itself.
        j, site: where it is.
        keys: the skips that it stashes and pops, by numbers that ranks agree on.
    """

    _batch: RankBatch
    layers: Any
    stats: PartitionStats | None
    place: Place

    def __init__(
        self, module: StageModule, wrapped: nn.Module, j: int, site: RankPlace,
        keys: Mapping[int, Key],
    ) -> None:  # fmt: skip
        # Without shapes torch would run the module to find them. Nobody uses these.
        shape = torch.empty(1, device="meta")
        xs = () if j == 0 else shape
        super().__init__(wrapped, j, len(site.homes), site.device, xs, shape, group=site.group)
        self._agreement, self._group = site.agreement, site.group
        self._module, self._is_wrapped = module, wrapped is not module  # which sees each backward
        self._before, _, self._after, *_ = (-1, *site.homes, -1)[j:]  # the neighbours' ranks
        self._keys = keys
        self._kept: dict[int, RankMicroBatch] = defaultdict(RankMicroBatch)
        self.shared: list[Shared] = []

    def begin(
        self, batch: RankBatch, place: Place, layers: Any, stats: PartitionStats | None
    ) -> None:
        """Begin a mini-batch; :meth:`end` must follow."""
        self._batch, self.place, self.layers, self.stats = batch, place, layers, stats
        self._pack: Callable[[Tensors], Parcel] | None = None
        self._module.forward_micro_batch = self._forward

    def end(self) -> None:
        """Drop all that is kept of the mini-batch."""
        self._module.forward_micro_batch = None
        self._batch = self.layers = self.stats = None  # type: ignore[assignment]
        self._kept.clear()

    def get_fwd_recv_ops(self, i: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        header = self._agreement.receive(self._before)
        if header == FAILED:
            return []
        self._kept[i].arrived = arrived = Arrived(header, self.device)
        return transfers(dist.irecv, arrived.tensors, self._before, self._group)

    def forward_one_chunk(self, i: int, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        kept, batch, self._i = self._kept[i], self._batch, i
        batch.is_failed |= not self.is_first and kept.arrived is None
        xs = () if kept.arrived is None else kept.arrived.leaves()
        kept.xs = tuple([x for x in xs if x.requires_grad])
        ys: Any = self.forward_maybe_with_nosync(*xs)  # type: ignore[no-untyped-call]
        ys = ys if isinstance(ys, tuple) else (ys,)
        kept.ys = tuple([y for y in ys if y.requires_grad])
        packing, self._pack = self._pack, None
        if packing is not None:
            try:
                kept.header, kept.tensors = packing(ys)
            except Exception as error:  # such as what pickle does not take
                self._fail(error, Action(FORWARD, i, self.stage_index))
        if not self.has_backward:
            kept.arrived, kept.xs, kept.ys = None, (), ()
        if self.is_last:
            return ys[0]
        batch.sent += self._agreement.send(kept.header, self._after)
        return None

    def _forward(self, tensors: Tensors) -> Tensors:
        """Call the layers with the tensors that came; return those that leave, or the loss.

        After a failure, return a zero.
        """
        batch, i, ys = self._batch, self._i, None
        if not batch.is_failed:
            run = batch.context.variables.copy().run
            ys = run(self._carry_out, FORWARD, i, batch.is_sharded, self._compute, i, tensors)
        return (self._zero(tensors),) if ys is None else ys

    def _compute(self, i: int, tensors: Tensors) -> Tensors:
        arrived, keys, shared = self._kept[i].arrived, self._keys, list[Shared]()
        if arrived is None:
            x = moved(self._batch.inputs[i], self.device)
        else:
            x, shared = _entered(arrived.rebuild(tensors)), arrived.shared
        passing: Any  # skips, by numbers
        x, passing = x if isinstance(x, Carried) else Carried(x, {})
        self.shared = [s for k, s in zip((*passing, None), shared) if k is None or k in keys]
        skips = {keys[k]: passing.pop(k) for k in [*passing] if k in keys}
        segments = self.layers.segments(i) if i < self._batch.recomputed else None
        y = compute(self, i, segments, Carried(x, skips) if keys else x)
        if isinstance(y, Carried):
            y, left = y
            passing.update({k: left[key] for k, key in keys.items() if key in left})
        ys, rebuild = tensors_of(Carried(y, passing) if passing else y)
        if not self.is_last:
            self._pack = lambda ys: pack(rebuild(ys))
        return ys

    @property
    def loss(self) -> Callable[[int, Value], Tensor] | None:
        """Computes the loss, in the last partition; in an evaluation a zero."""
        return self._finish if self.is_last else None

    def _finish(self, i: int, y: Value) -> Tensor:
        step = self._batch.step
        if step is None:
            self._batch.outputs[i] = detached(y)
            return torch.zeros((), device=self.device)
        target = moved(step.loss.targets[i], self.device)
        return step.compute_loss(i, self.place, self._batch.seed, y, target).reshape(())

    def _zero(self, tensors: Tensors) -> Tensor:
        """Return a zero computed from all tensors for which a gradient is expected."""
        leaves = [t for t in (*tensors, *self.submod.parameters()) if t.requires_grad]
        zero = torch.zeros((), device=self.device)
        return sum((t.reshape(-1)[:1].sum() * 0.0 for t in leaves), zero)

    def _carry_out(
        self, kind: str, i: int, raises: bool, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Call a function as a task; keep its error until all ranks have finished.

        It ``raises`` where replicas would wait for a collective that this rank leaves out.
        """
        action = Action(kind, i, self.stage_index)
        try:
            with microbatch(i), self._batch.trace.task(action, self.device):
                return function(*args)
        except BaseException as error:  # noqa: B036
            self._fail(error, action)
            if raises:
                raise
        return None

    def _fail(self, error: BaseException, action: Action) -> None:
        # The type comes first, since str() of other errors may fail.
        if type(error) is RuntimeError and error.__cause__ and _TORCHS_ERROR in str(error):
            error = error.__cause__
        self.place.note(error, action)
        if self._batch.failure is None:
            self._batch.trace.failed(action, self.device, error)
        self._batch.fail(error, action)

    def get_fwd_send_ops(self, i: int) -> list[dist.P2POp]:
        kept = self._kept[i]
        tensors, kept.tensors = kept.tensors, ()
        return transfers(dist.isend, tensors, self._after, self._group)

    def get_bwd_recv_ops(self, i: int) -> list[dist.P2POp]:
        kept = self._kept[i]
        if kept.header != FAILED:
            kept.dys = [torch.empty_like(y.detach()) for y in kept.ys]
        return transfers(dist.irecv, kept.dys, self._after, self._group)

    def backward_one_chunk(
        self, i: int, loss: Tensor | None = None, full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:  # fmt: skip
        if not self.has_backward:
            return
        batch, kept = self._batch, self._kept[i]
        dxs: list[Tensor | None] = [None] * len(kept.xs)

        def go_back() -> None:
            ends, dys = kept.ys, list[Tensor | None](kept.dys)
            if loss is not None and batch.step is not None:
                ends, dys = (loss,), [batch.step.loss.gradient_of(i, loss.detach())]
            elif kept.header == FAILED:
                ends, dys = (self._zero(ends),), [None]
            given = {"stage_output": ends, "output_grads": dys, "input_values": kept.xs}
            dxs[:], _ = self.backward_maybe_with_nosync("full", given, last_backward)

        if self._is_wrapped or not batch.is_failed:
            self._carry_out(BACKWARD, i, self._is_wrapped or batch.is_sharded, go_back)
        kept.ys = kept.xs = kept.dys = ()
        if kept.arrived is not None:
            kept.dxs, kept.arrived = kept.arrived.gradients(dxs), None

    def get_bwd_send_ops(self, i: int) -> list[dist.P2POp]:
        kept = self._kept[i]
        dxs, kept.dxs = kept.dxs, ()
        return transfers(dist.isend, dxs, self._before, self._group)


# torch wraps each error of a backward in one that prints all of its inputs, which may be long.
_TORCHS_ERROR = "Failed to run stage backward"


def moved(value: Value, device: torch.device) -> Value:
    """Return the value on a device."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([tensor.to(device) for tensor in tensors]))


def _entered(x: Value) -> Value:
    """Pass the leaves of ``x`` through an operation, since no layer may change a leaf in place."""
    xs, rebuild = differentiable(x)
    return rebuild(join(ENTRANCE, *xs)) if xs else x


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def check_schedule(schedule: Any, n: int, ranks: int) -> str:
    """Check that a schedule fits ``n`` partitions on that many ranks; return its name."""
    if schedule not in [*SCHEDULES]:
        raise ValueError(f"schedule must be one of {[*SCHEDULES]}, got {schedule!r}")
    if n != ranks and (schedule != "interleaved" or n % ranks or ranks == 1):
        raise ValueError(
            f"schedule {schedule!r} needs one partition on each rank, or with 'interleaved' and "
            f"several ranks a multiple of them; but there are {n} partitions for {ranks} ranks"
        )
    return "1f1b" if n == ranks and schedule == "interleaved" else schedule


def make_schedule(
    name: str, stages: list[RankStage], m: int, loss_fn: Callable[..., Any] | None
) -> Any:
    """Make torch's schedule for ``m`` micro-batches; forward only without a ``loss_fn``."""
    made: Any = SCHEDULES[name]
    if name == "interleaved":
        made = ScheduleLoopedBFS if loss_fn is None else made
        return made(stages, m, loss_fn=loss_fn, scale_grads=False)
    if loss_fn is None or m < stages[0].num_stages:
        made = ScheduleGPipe  # with so few micro-batches 1F1B is the same
    return made(stages[0], m, loss_fn=loss_fn, scale_grads=False)
