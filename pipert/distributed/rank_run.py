"""Runs one mini-batch over several ranks.

1. All ranks report what they were called with, such as the rows of the inputs on the first and of
   the target on the last. If the reports do not fit together, all raise before anything is sent.
2. torch's schedule runs. It is kept for further mini-batches of as many micro-batches.
3. All ranks report whether they succeeded. Only then are gradients accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pipert._typing import Value
from pipert.batch.joining import gather
from pipert.batch.tensors import differentiable
from pipert.distributed.rank_agreement import RankError
from pipert.distributed.rank_gradients import EarlierGradients, TiedParameter, sum_tied
from pipert.distributed.rank_partition import RankBatch, RankPartition
from pipert.distributed.rank_parts import RankParts
from pipert.distributed.rank_reports import (
    CallArguments,
    RankReport,
    RankSettings,
    Site,
    StepArguments,
    check,
    prepare,
)
from pipert.distributed.rank_stage import RankStage
from pipert.distributed.torch_schedules import make_schedule
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.call import Layers, RandomLayers
from pipert.layers.drawing import draws
from pipert.layers.effects import Effects
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.observe.notifier import Counters
from pipert.schedules.plan import plan, plan_call, recomputed
from pipert.skip import store
from pipert.stage.step import without_grad
from pipert.stage.step_boundary import leaf_inputs
from pipert.workers.context import CallerContext

Prepared = tuple[Any, list[RankStage], dict[int, RankPartition]]


@dataclass(eq=False)
class RankRuntime:
    """Runs mini-batches on this rank's partitions. All ranks call its methods together."""

    site: Site
    parts: RankParts
    wrapped: dict[int, nn.Module]
    """The modules that torch's stages call in place of this rank's partitions."""
    tied: Sequence[TiedParameter]
    """The parameters that this rank shares with others."""

    def __post_init__(self) -> None:
        self.counters = Counters()
        layers = [layer for part in self.parts.modules.values() for layer in part.modules()]
        self._sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
        self._schedules: dict[tuple[str, int, bool], tuple[Any, list[RankStage]]] = {}

    def run(
        self, arguments: CallArguments, settings: RankSettings, step: StepArguments | None
    ) -> tuple[Tensor | None, Value]:
        """Run a mini-batch: forward, and backward if it is a step.

        Returns:
            The loss of a step, and the outputs if they are wanted and this is the last rank: of
            micro-batches that came ready a list with the output of each.
        """
        agreement, modules, model = self.site.agreement, self.parts.modules, self.parts.model
        with agreement.agreeing("a mini-batch") as reports:
            tied = {one.number: one.parameter.requires_grad for one in self.tied}
            called = arguments, settings, step, tied
            report, own, make_loss = prepare(self.site, modules, model.inputs, *called)
            reports.append(report)
        check(self.site, reports)
        first: RankReport = agreement.of(self.site.homes[0], reports)
        arrived = own.exchanged(self.site, first.header) if model.inputs == "shared" else None
        m, n, is_step = len(first.sizes), len(self.site.homes), step is not None
        planned = plan("gpipe", m, n) if is_step else plan_call(m, n, range(n))
        earlier, stats = None, None
        with self.counters.open(planned) as notifier:
            try:
                with agreement.agreeing() as reports:
                    inputs = own.values
                    if arrived is not None:
                        inputs = arrived.rebuild(tuple(arrived.tensors))
                    # Also in a forward: a new stage of torch drops gradients of sharded parameters.
                    earlier = EarlierGradients(self.wrapped.values())
                    stats = DeferredStats([*modules.values()]) if settings.deferred else None
                    loss = None if make_loss is None else make_loss(first.sizes)
                    given = [*inputs, *(() if loss is None else loss.targets)]
                    leaves = [leaf_inputs(x) for x in given] if is_step else given
                    if loss is not None:
                        loss.targets = leaves[len(inputs) :]
                    batch = RankBatch(
                        first.sizes,
                        leaves[: len(inputs)],
                        recomputed(settings.checkpoint, m) if is_step else 0,
                        RunSeed(first.seed),
                        notifier,
                        self._context(),
                        loss,
                        keep_outputs=step is None or step.keep_outputs,
                        is_ready=arguments.microbatches is not None,
                        is_wrapped=any(self.wrapped[j] is not part for j, part in modules.items()),
                        is_sharded=bool(self._sharded),
                    )
                    prepared = self._prepared(settings.schedule, batch, stats, is_step)
                    reports.append(model.prepare(batch))
                for i in sorted(set().union(*reports)):
                    self._record(settings.schedule, batch, i)
                result = self._go(prepared, batch, earlier, is_step)
                notifier.outcome = "succeeded"
            except BaseException as error:
                if isinstance(error, Exception):  # an interrupt leaves it cancelled
                    notifier.outcome = "failed"
                if earlier is not None:
                    earlier.restore()
                raise
        if stats is not None:
            stats.commit()
        if is_step:
            _deliver(given, leaves)
        return result

    def _context(self) -> CallerContext:
        device = self.site.device
        context = CallerContext([device] if device.type == "cuda" else [])
        context.set_variable(store.of_task, store.NEW)
        return context

    def _partitions(
        self, batch: RankBatch, stats: DeferredStats | None
    ) -> dict[int, RankPartition]:
        """Make the objects that compute this rank's partitions in this mini-batch."""
        partitions, m, n = {}, len(batch.sizes), len(self.site.homes)
        for k, (j, module) in enumerate(self.parts.modules.items()):
            place = Place(j, n, m, self.site.device, self.parts.before[j])
            skips = self.parts.skips[j]
            about = module, place, batch.context, skips, batch.notifier, batch.effects
            draws_loss = place.is_last and batch.loss is not None and batch.loss.draws
            layers = Layers(*about)
            if draws_loss or draws(module):
                layers = RandomLayers(batch.seed, *about)
            own_stats = None if stats is None else stats.partitions[k]
            computing = self.parts.model.computing(place, layers, batch)
            partitions[j] = RankPartition(module, place, computing, batch, own_stats)
        return partitions

    def _prepared(
        self, name: str, batch: RankBatch, stats: DeferredStats | None, is_step: bool
    ) -> Prepared:
        """Return torch's schedule, its stages, and what computes their partitions."""
        return *self._schedule(name, len(batch.sizes), is_step), self._partitions(batch, stats)

    def _record(self, name: str, batch: RankBatch, i: int) -> None:
        """Let the model see a forward of micro-batch ``i``, for which it has no record."""
        agreement, model = self.site.agreement, self.parts.model
        # With a graph, which shows what layers keep elsewhere than in what they return.
        with torch.enable_grad(), model.unchanged():
            with agreement.agreeing():
                alone = replace(
                    batch, sizes=[batch.sizes[i]], inputs=[batch.inputs[i]], recomputed=0,
                    loss=None, keep_outputs=False, sent=[], effects=Effects(at_end=True),
                    records=[None],
                )  # fmt: skip
                prepared = self._prepared(name, alone, None, False)
            self._run_schedule(*prepared, alone)
        seen = agreement.agree(alone.seen, *alone.take_failure())
        model.note(batch, i, [agreement.of(rank, seen) for rank in {*self.site.homes}])

    def _go(
        self, prepared: Prepared, batch: RankBatch, earlier: EarlierGradients, is_step: bool
    ) -> tuple[Tensor | None, Value]:
        """Run torch's schedule, and accumulate gradients if all ranks succeeded.

        Returns:
            The loss of a step, and the outputs.
        """
        agreement, home_of_loss = self.site.agreement, self.site.homes[-1]
        self._run_schedule(*prepared, batch)
        loss, outputs = self._result(batch)
        ended = agreement.agree((batch.seed.used, loss.dtype), *batch.take_failure())
        if any(used for used, _ in ended):
            batch.seed.used = True
        batch.seed.settle()
        if not is_step:
            for part in self._sharded:  # only what is sharded again has its gradients
                part.reshard()
            earlier.restore()
            return None, outputs
        with agreement.talking():
            loss = loss.to(agreement.of(home_of_loss, ended)[1])
            dist.broadcast(loss, home_of_loss, group=self.site.group)
            sum_tied(self.tied, self.site)
        earlier.add()
        return loss, outputs

    def _schedule(self, name: str, m: int, is_step: bool) -> tuple[Any, list[RankStage]]:
        """Return torch's schedule and stages for ``m`` micro-batches, made if they are new."""
        key = name, m, is_step
        if key not in self._schedules:
            stages = [RankStage(module, j, self.site) for j, module in self.wrapped.items()]
            # The last partition computes the loss itself.
            loss_fn = (lambda loss, _: loss) if is_step else None
            self._schedules[key] = make_schedule(name, stages, m, loss_fn), stages
        return self._schedules[key]

    def _run_schedule(
        self,
        schedule: Any,
        stages: list[RankStage],
        partitions: dict[int, RankPartition],
        batch: RankBatch,
    ) -> None:
        numbers = {} if batch.loss is None else {"target": torch.arange(len(batch.sizes))}
        for stage in stages:
            stage.begin(partitions[stage.stage_index])
        try:
            with self.site.agreement.talking(batch.at):
                schedule.step(**numbers, return_outputs=False)
                for work in batch.sent:
                    work.wait()
        except RankError:
            if batch.failure is None:
                raise
            raise batch.take_failure()[0] from None  # type: ignore[misc]
        finally:
            for stage in stages:
                stage.end()

    def _result(self, batch: RankBatch) -> tuple[Tensor, Value]:
        """Return the loss and the outputs; on all ranks but the last, placeholders."""
        loss, outputs = torch.ones((), device=self.site.device), None
        m = range(len(batch.sizes))
        try:
            if not batch.is_failed:
                batch.effects.check()
            if batch.loss is not None and not batch.is_failed:
                if not batch.loss.is_differentiable:
                    raise without_grad()
                loss = batch.loss.of_mini_batch(torch.stack([batch.losses[i] for i in m]))
            if len(batch.outputs) == len(m):
                outputs = [batch.outputs[i] for i in m]
                outputs = outputs if batch.is_ready else gather(outputs, batch.sizes)
        except Exception as error:
            batch.fail(error, None)
        return loss, outputs


def _deliver(given: Sequence[Value], leaves: Sequence[Value]) -> None:
    """Pass the gradients of the inputs and targets on to the caller's graph."""
    tensors = [x for value in given for x in differentiable(value)[0]]
    grads = [leaf.grad for value in leaves for leaf in differentiable(value)[0]]
    arrived = [(x, dx) for x, dx in zip(tensors, grads, strict=True) if dx is not None]
    if arrived:
        torch.autograd.backward([x for x, _ in arrived], [dx for _, dx in arrived])
