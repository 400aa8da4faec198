"""One mini-batch's way over several ranks, from what each brings to what each gets.

1. All ranks say what they bring: the first its rows, the last those of the target. Whatever does
   not fit is refused on all, before anything is sent.
2. If they meet a shape for the first time, one micro-batch of each kind goes through the layers
   from rank to rank (``meeting``), and torch's stages are built for what crosses.
3. torch's schedule runs.
4. All ranks say whether they succeeded. Only then do gradients arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pipert._typing import Value
from pipert.batch.joining import gather
from pipert.batch.microbatch import scatter_with_sizes
from pipert.batch.tensors import differentiable, tensors_of
from pipert.distributed.agreement import Control, RankError
from pipert.distributed.boundary import Boundary
from pipert.distributed.gradients import Gradients, Tied
from pipert.distributed.meeting import meet
from pipert.distributed.schedules import make_schedule
from pipert.distributed.stages import MiniBatch, Running, Stage, StageModule
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.call import Layers, RandomLayers
from pipert.layers.compiling import refuse_compilation
from pipert.layers.drawing import draws
from pipert.layers.parametrized import compute_cached
from pipert.layers.place import Place
from pipert.layers.random_numbers import GivenSeed, next_seed
from pipert.model.settings import recomputed
from pipert.schedules.plan import plan, plan_call
from pipert.seeing.counters import Counters
from pipert.seeing.told import Told
from pipert.skip import store
from pipert.skip.routes import PartitionSkips
from pipert.stage.cut import leaf_inputs
from pipert.stage.loss import LossFunction, check_step, loss_of, scale_of
from pipert.stage.step import without_grad
from pipert.workers.context import CallerContext, refuse_transforms

__all__: list[str] = []

_KEPT = 8  # shapes whose stages are kept, each with buffers for all micro-batches


class Site(NamedTuple):
    """Where the partitions of a pipe are."""

    control: Control
    group: dist.ProcessGroup
    """The pipeline."""
    homes: Sequence[int]
    """The rank of each partition."""
    ends: Sequence[tuple[int, int]]
    """Of each data-parallel replica, where among the ranks that agree are those of its first and
    last partition."""
    number: int
    """Of this replica."""
    device: torch.device


class Settings(NamedTuple):
    """A pipe's, for one mini-batch; the same on all ranks."""

    chunks: int
    checkpoint: str
    schedule: str
    deferred: bool


class Step(NamedTuple):
    """What ``forward_backward`` was asked for."""

    loss_fn: LossFunction
    target: Value
    reduction: str
    scale: float | Tensor | torch.amp.GradScaler | None
    keep_outputs: bool


class Brought(NamedTuple):
    """What a rank tells the others before a mini-batch."""

    settings: tuple[Any, ...]
    """What must be the same on all."""
    sizes: tuple[int, ...]
    """The rows of each micro-batch; the first rank's count."""
    looks: tuple[Any, ...]
    """What each looks like: those that are alike cross boundaries alike; likewise."""
    target_sizes: tuple[int, ...]
    """The rows of each micro-batch of the target, if it has any; the last rank's count."""
    seed: int
    """Of the random numbers; the first rank's counts."""


class Prepared(NamedTuple):
    """What is kept for mini-batches of one shape."""

    schedule: Any
    stages: list[Stage]
    boundaries: dict[int, Boundary]
    """Those of this rank's partitions, by the partition that receives."""


@dataclass(eq=False)
class Runtime:
    """Runs mini-batches; each method is called by all ranks."""

    site: Site
    modules: dict[int, StageModule]
    """This rank's partitions, by number."""
    wrapped: dict[int, nn.Module]
    """What torch's stages run in their place."""
    skips: Sequence[PartitionSkips]
    """Of all partitions."""
    before: Sequence[str]
    """What errors call the layer before each partition."""
    tied: Sequence[Tied]

    def __post_init__(self) -> None:
        self.counters = Counters()
        self._n = len(self.site.homes)
        layers = [layer for part in self.modules.values() for layer in part.modules()]
        self._is_sharded = any(isinstance(layer, FSDPModule) for layer in layers)
        self._is_last = self._n - 1 in self.modules
        self._kept: OrderedDict[Any, Prepared] = OrderedDict()

    def run(
        self, args: Any, kwargs: Any, settings: Settings, step: Step | None
    ) -> tuple[Tensor | None, Value]:
        """Run a mini-batch: forward, and backward if it is a step.

        Returns:
            The loss of a step; and, on the last rank, the outputs if they are wanted.
        """
        with self.site.control.agreeing() as brought:
            own, inputs, targets = self._bring(args, kwargs, settings, step)
            if step is not None:
                step = step._replace(scale=scale_of(step.scale, [self.site.device]))
            brought.append(own)
        self._check(brought)
        first = brought[self.site.ends[self.site.number][0]]
        m, ranks = len(first.sizes), range(self._n)
        planned = plan_call(m, self._n, ranks) if step is None else plan("gpipe", m, self._n)
        with self.counters.open(planned) as told, _failing(told):
            batch = self._batch(first, settings, step, targets, told)
            stats = DeferredStats(list(self.modules.values())) if settings.deferred else None
            leaves = inputs if step is None else [leaf_inputs(x) for x in inputs]
            running = self._running(batch, leaves, stats)
            prepared = self._prepare(brought, running, settings, step is not None)
            loss, outputs = self._go(prepared, running, batch, step is not None)
            told.outcome = "succeeded"
        if stats is not None:
            stats.commit()
        if step is not None:
            _give(inputs, leaves)
        return loss, outputs

    def _bring(
        self, args: Any, kwargs: Any, settings: Settings, step: Step | None
    ) -> tuple[Brought, list[Value], list[Value]]:
        """What this rank brings, and its micro-batches of inputs and targets."""
        refuse_compilation()
        refuse_transforms()
        compute_cached(self.modules.values())
        inputs: list[Value] = []
        targets: list[Value] = []
        sizes: list[int] = []
        rows: list[int] = []
        kind = "forward"
        if step is not None:
            check_step(step.loss_fn, step.reduction)
            kind = f"forward_backward with reduction={step.reduction!r}"
        if 0 in self.modules:
            inputs, sizes = scatter_with_sizes(args, kwargs, settings.chunks)
        if step is not None and self._is_last:
            targets, rows = scatter_with_sizes((step.target,), {}, settings.chunks)
            if not any(tensor.dim() for tensor in tensors_of(step.target)[0]):
                rows = []
        mode = "training" if any(m.training for m in self.modules.values()) else "evaluation"
        autocast = torch.is_autocast_enabled(self.site.device.type)
        alike = kind, mode, f"autocast={autocast}", *settings
        looks = tuple(map(_look, inputs))
        own = Brought(alike, tuple(sizes), looks, tuple(rows), next_seed())
        return own, inputs, targets

    def _check(self, brought: Sequence[Brought]) -> None:
        """Refuse on all ranks what does not go together."""
        self.site.control.require_same("call and settings", [one.settings for one in brought])
        counts = [len(brought[first].sizes) for first, _ in self.site.ends]
        if len(set(counts)) > 1:
            raise ValueError(
                "replicas must have as many micro-batches, but have "
                f"{' and '.join(map(str, counts))}; give each as many rows as the pipe has chunks, "
                "or leave the last batch out"
            )
        for first, last in self.site.ends:
            sizes, rows = brought[first].sizes, brought[last].target_sizes
            if rows and rows != sizes:
                raise ValueError(
                    "arguments and target must have the same number of rows, but the arguments on "
                    f"the first rank have {sum(sizes)} and the target on the last has {sum(rows)}"
                )

    def _batch(
        self,
        first: Brought,
        settings: Settings,
        step: Step | None,
        targets: list[Value],
        told: Told,
    ) -> MiniBatch:
        m, device = len(first.sizes), self.site.device
        loss = None
        if step is not None and self._is_last:
            targets = targets if len(targets) == m else targets * m  # of one that has no rows
            scale: Any = step.scale
            loss = loss_of(step.loss_fn, targets, first.sizes, step.reduction, scale)
        context = CallerContext([device] if device.type == "cuda" else [])
        context.set_variable(store.of_task, store.NEW)
        return MiniBatch(
            first.sizes,
            0 if step is None else recomputed(settings.checkpoint, m),
            GivenSeed(first.seed), told, context, loss,
            keep_outputs=step is None or step.keep_outputs,
            is_wrapped=any(self.wrapped[j] is not part for j, part in self.modules.items()),
            is_sharded=self._is_sharded,
        )  # fmt: skip

    def _running(
        self, batch: MiniBatch, inputs: Sequence[Value], stats: DeferredStats | None
    ) -> dict[int, Running]:
        """This rank's partitions, as they run this mini-batch."""
        running = {}
        for k, (j, module) in enumerate(self.modules.items()):
            place = Place(j, self._n, len(batch.sizes), self.site.device, self.before[j])
            about = module, place, batch.context, self.skips[j], batch.told
            draws_loss = j == self._n - 1 and batch.loss is not None and batch.loss.draws
            layers = Layers(*about)
            if draws_loss or draws(module):
                layers = RandomLayers(batch.seed, *about)
            of_stats = None if stats is None else stats.partitions[k]
            own = batch, self.skips[j], inputs, of_stats
            running[j] = Running(module, self.wrapped[j], place, layers, *own)
        return running

    def _prepare(
        self,
        brought: Sequence[Brought],
        running: dict[int, Running],
        settings: Settings,
        is_step: bool,
    ) -> Prepared:
        """torch's schedule and stages for these shapes, in all replicas alike."""
        control = self.site.control
        looks = tuple([brought[first].looks for first, _ in self.site.ends])
        key = looks, brought[0].settings
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        mine = looks[self.site.number]
        firsts = sorted({of.index(look) for of in looks for look in of})  # of kinds, anywhere
        kinds = [mine[i] for i in firsts]
        samples = meet(control, running, self.site.homes, firsts)
        numbers = [kinds.index(look) for look in mine]
        with control.agreeing():
            boundaries = {j: Boundary(j, found, numbers) for j, found in samples.items()}
            stages = [self._stage(j, boundaries) for j in running]
            loss_fn = _as_it_is if is_step else None
            schedule = make_schedule(settings.schedule, stages, len(mine), loss_fn)
            prepared = Prepared(schedule, stages, boundaries)
        self._kept[key] = prepared
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return prepared

    def _stage(self, j: int, boundaries: dict[int, Boundary]) -> Stage:
        site, result = self.site, (torch.empty(1, device="meta"),)
        arriving = boundaries[j].as_meta() if j else ()
        leaving = boundaries[j + 1].as_meta() if j < self._n - 1 else result
        run = self.wrapped[j]
        return Stage(run, j, self._n, site.device, arriving, leaving, group=site.group)

    def _go(
        self, prepared: Prepared, running: dict[int, Running], batch: MiniBatch, is_step: bool
    ) -> tuple[Tensor | None, Value]:
        """Run torch's schedule; let gradients arrive if all ranks have succeeded.

        Returns:
            The loss of a step, and the outputs.
        """
        control = self.site.control
        parameters = [p for part in self.modules.values() for p in part.parameters()]
        are_views = any(
            getattr(called, "gradient_as_bucket_view", False) for called in self.wrapped.values()
        )
        # In a forward, too: torch's new stages drop those of what fully_shard has changed.
        gradients = Gradients(list(dict.fromkeys(parameters)), is_step and are_views)
        try:
            with _attached(prepared, running):
                self._schedule(prepared, batch)
            result, outputs = self._result(batch)
            if any(control.agree(batch.seed.used, *batch.take_failure())):
                batch.seed.use()
            batch.seed.settle()
            if not is_step:
                gradients.restore()
                return None, outputs
            with control.talking():
                dist.broadcast(result, self.site.homes[-1], group=self.site.group)
                gradients.add(self.tied, result[1])
            return result[0].to(torch.get_default_dtype()), outputs
        except BaseException:
            gradients.restore()
            raise

    def _schedule(self, prepared: Prepared, batch: MiniBatch) -> None:
        numbers = {} if batch.loss is None else {"target": torch.arange(len(batch.sizes))}
        try:
            with self.site.control.talking(lambda: f"at {batch.last}"):
                prepared.schedule.step(**numbers)
        except RankError:
            if batch.failure is None:
                raise
            raise batch.take_failure()[0] from None  # type: ignore[misc]

    def _result(self, batch: MiniBatch) -> tuple[Tensor, Value]:
        """What the last rank tells the others, and the outputs.

        That is the loss, and what gradients are multiplied by.
        """
        result, outputs = torch.ones(2, dtype=torch.float64, device=self.site.device), None
        m = len(batch.sizes)
        try:
            if batch.loss is not None and batch.failure is None:
                if not batch.loss.is_differentiable:
                    raise without_grad()
                losses = [batch.losses[i].reshape(()) for i in range(m)]
                result[0] = batch.loss.of_mini_batch(torch.stack(losses))
                correction = batch.loss.counts.correction()
                if correction is not None:
                    if batch.is_wrapped or batch.is_sharded:
                        raise TypeError(_UNCOUNTED)
                    result[1] = correction
            if len(batch.outputs) == m:
                outputs = gather([batch.outputs[i] for i in range(m)], batch.sizes)
        except Exception as error:
            batch.fail(error, None)
        return result, outputs


@contextmanager
def _failing(told: Told) -> Iterator[None]:
    """Count what is raised as a failure, and nothing else: an interrupt cancels."""
    try:
        yield
    except Exception:
        told.outcome = "failed"
        raise


@contextmanager
def _attached(prepared: Prepared, running: dict[int, Running]) -> Iterator[None]:
    """Let the stages run this mini-batch in the block, and keep nothing of it afterwards."""
    for stage in prepared.stages:
        j = stage.stage_index
        running[j].arriving = prepared.boundaries.get(j)
        running[j].leaving = prepared.boundaries.get(j + 1)
        stage.running = running[j].module.running = running[j]
    try:
        yield
    finally:
        for stage in prepared.stages:
            stage.running.module.running = None
            del stage.running
            stage.clear_runtime_states()
            for kept in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
                kept.clear()


_UNCOUNTED = (
    "loss_fn returned a sum and a count, and gradients are averaged over replicas before all "
    "counts of a mini-batch are known; use schedule='gpipe', or return the mean of the micro-batch"
)


def _as_it_is(output: Tensor, _: Tensor) -> Tensor:
    """The loss, which the last partition computes itself."""
    return output


def _look(value: Value) -> Any:
    return tuple([(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors_of(value)[0]])


def _give(inputs: Sequence[Value], leaves: Sequence[Value]) -> None:
    """Let the gradients of the inputs arrive in the caller's graph."""
    tensors = [x for value in inputs for x in differentiable(value)[0]]
    grads = [leaf.grad for value in leaves for leaf in differentiable(value)[0]]
    arrived = [(x, dx) for x, dx in zip(tensors, grads, strict=True) if dx is not None]
    if arrived:
        torch.autograd.backward([x for x, _ in arrived], [dx for _, dx in arrived])
