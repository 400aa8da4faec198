"""Runs one mini-batch over several ranks.

1. All ranks report what they were called with, such as the rows of the inputs on the first and of
   the target on the last. If the reports do not fit together, all raise before anything is sent.
2. If the shape is new, one micro-batch of each kind goes through the layers from rank to rank
   (``meeting``), and torch's stages are made for the tensors that cross the boundaries.
3. torch's schedule runs.
4. All ranks report whether they succeeded. Only then are gradients accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pipert._typing import Value
from pipert.batch.joining import gather
from pipert.batch.tensors import differentiable
from pipert.distributed.agreement import RankError
from pipert.distributed.asked import Brought, Settings, Site, Step, bring, check
from pipert.distributed.gradients import Gradients, Tied
from pipert.distributed.meeting import reshard
from pipert.distributed.parts import Parts
from pipert.distributed.prepared import Prepared, Shapes, attached
from pipert.distributed.stages import MiniBatch, Running
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.call import Layers, RandomLayers
from pipert.layers.drawing import draws
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.observe.counters import Counters
from pipert.observe.notifier import Notifier
from pipert.schedules.plan import plan, plan_call, recomputed
from pipert.skip import store
from pipert.stage.loss import loss_of
from pipert.stage.step import without_grad
from pipert.stage.step_boundary import leaf_inputs
from pipert.workers.context import CallerContext

__all__: list[str] = []


@dataclass(eq=False)
class Runtime:
    """Runs mini-batches on this rank's partitions. All ranks call its methods together."""

    site: Site
    parts: Parts
    wrapped: dict[int, nn.Module]
    """The modules that torch's stages call in place of this rank's partitions."""
    tied: Sequence[Tied]
    """The parameters that this rank shares with others."""

    def __post_init__(self) -> None:
        self.counters = Counters()
        self._n = len(self.site.homes)
        layers = [layer for part in self.parts.modules.values() for layer in part.modules()]
        self._is_sharded = any(isinstance(layer, FSDPModule) for layer in layers)
        self._shapes = Shapes(self.site, self.wrapped)

    def run(
        self, args: Any, kwargs: Any, settings: Settings, step: Step | None
    ) -> tuple[Tensor | None, Value]:
        """Run a mini-batch: forward, and backward if it is a step.

        Returns:
            The loss of a step, and the outputs if they are wanted and this is the last rank.
        """
        with self.site.control.agreeing("a mini-batch") as brought:
            given = args, kwargs, settings, step
            own, step, inputs, targets = bring(self.site, self.parts.modules, *given, self.tied)
            brought.append(own)
        check(self.site, brought)
        first = brought[self.site.ends[self.site.number][0]]
        m, ranks = len(first.sizes), range(self._n)
        planned = plan_call(m, self._n, ranks) if step is None else plan("gpipe", m, self._n)
        with self.counters.open(planned) as notifier:
            try:
                batch = self._batch(first, settings, step, targets, notifier)
                stats = DeferredStats([*self.parts.modules.values()]) if settings.deferred else None
                leaves = inputs if step is None else [leaf_inputs(x) for x in inputs]
                running = self._running(batch, leaves, stats)
                prepared = self._shapes.prepare(brought, running, settings, step is not None)
                loss, outputs = self._go(prepared, running, batch, step is not None)
                notifier.outcome = "succeeded"
            except Exception:  # an interrupt leaves it cancelled
                notifier.outcome = "failed"
                raise
        if stats is not None:
            stats.commit()
        if step is not None:
            _give(inputs, leaves)
        return loss, outputs

    def _batch(
        self,
        first: Brought,
        settings: Settings,
        step: Step | None,
        targets: list[Value],
        notifier: Notifier,
    ) -> MiniBatch:
        m, device = len(first.sizes), self.site.device
        loss = None
        if step is not None and self._n - 1 in self.parts.modules:
            targets = targets if len(targets) == m else targets * m  # a target without rows
            loss_fn: Any = step.loss_fn  # checked by bring, as the scale is
            scale: Any = step.scale
            loss = loss_of(loss_fn, targets, first.sizes, step.reduction, step.denominator, scale)
        context = CallerContext([device] if device.type == "cuda" else [])
        context.set_variable(store.of_task, store.NEW)
        return MiniBatch(
            first.sizes,
            0 if step is None else recomputed(settings.checkpoint, m),
            RunSeed(first.seed), notifier, context, loss,
            keep_outputs=step is None or step.keep_outputs,
            is_wrapped=any(self.wrapped[j] is not part for j, part in self.parts.modules.items()),
            is_sharded=self._is_sharded,
        )  # fmt: skip

    def _running(
        self, batch: MiniBatch, inputs: Sequence[Value], stats: DeferredStats | None
    ) -> dict[int, Running]:
        """Make the objects that run this rank's partitions in this mini-batch."""
        running = {}
        for k, (j, module) in enumerate(self.parts.modules.items()):
            place = Place(j, self._n, len(batch.sizes), self.site.device, self.parts.before[j])
            about = module, place, batch.context, self.parts.skips[j], batch.notifier
            draws_loss = place.is_last and batch.loss is not None and batch.loss.draws
            layers = Layers(*about)
            if draws_loss or draws(module):
                layers = RandomLayers(batch.seed, *about)
            own_stats = None if stats is None else stats.partitions[k]
            rest = batch, self.parts.skips[j], inputs, own_stats
            running[j] = Running(module, self.wrapped[j], place, layers, *rest)
        return running

    def _go(
        self, prepared: Prepared, running: dict[int, Running], batch: MiniBatch, is_step: bool
    ) -> tuple[Tensor | None, Value]:
        """Run torch's schedule, and accumulate gradients if all ranks succeeded.

        Returns:
            The loss of a step, and the outputs.
        """
        control = self.site.control
        parameters = [p for part in self.parts.modules.values() for p in part.parameters()]
        are_views = any(
            getattr(called, "gradient_as_bucket_view", False) for called in self.wrapped.values()
        )
        # Also in a forward: a new stage of torch drops the gradients of sharded parameters.
        gradients = Gradients(list(dict.fromkeys(parameters)), is_step and are_views)
        if is_step and not batch.is_sharded:
            batch.gradients = gradients
        try:
            with attached(prepared, running):
                self._schedule(prepared, batch)
            result, dtype, outputs = self._result(batch)
            on_cpu = self.site.device.type == "cpu"  # other devices need not be waited for
            report = batch.seed.used, dtype, result if on_cpu else None
            reports = control.agree(report, *batch.take_failure())
            if any(used for used, _, _ in reports):
                batch.seed.use()
            batch.seed.settle()
            if not is_step:
                for part in self.parts.modules.values():
                    reshard(part)
                gradients.restore()
                return None, outputs
            _, dtype, last_result = reports[self.site.ends[self.site.number][1]]
            with control.talking():
                if on_cpu:
                    result = last_result
                else:
                    dist.broadcast(result, self.site.homes[-1], group=self.site.group)
                gradients.add(self.tied)
            return result.to(dtype), outputs
        except BaseException:
            gradients.restore()
            raise

    def _schedule(self, prepared: Prepared, batch: MiniBatch) -> None:
        numbers = {} if batch.loss is None else {"target": torch.arange(len(batch.sizes))}
        try:
            with self.site.control.talking(batch.at):
                prepared.schedule.step(**numbers)
        except RankError:
            if batch.failure is None:
                raise
            raise batch.take_failure()[0] from None  # type: ignore[misc]

    def _result(self, batch: MiniBatch) -> tuple[Tensor, torch.dtype, Value]:
        """Return the loss in double precision, its dtype, and the outputs.

        They are placeholders on all ranks but the last.
        """
        dtype = torch.float64
        result, outputs = torch.ones((), dtype=torch.float64, device=self.site.device), None
        m = len(batch.sizes)
        try:
            if batch.loss is not None and batch.failure is None:
                if not batch.loss.is_differentiable:
                    raise without_grad()
                losses = [batch.losses[i].reshape(()) for i in range(m)]
                loss = batch.loss.of_mini_batch(torch.stack(losses))
                result, dtype = loss.to(result), loss.dtype
            if len(batch.outputs) == m:
                outputs = gather([batch.outputs[i] for i in range(m)], batch.sizes)
        except Exception as error:
            batch.fail(error, None)
        return result, dtype, outputs


def _give(inputs: Sequence[Value], leaves: Sequence[Value]) -> None:
    """Pass the gradients of the inputs on to the caller's graph."""
    tensors = [x for value in inputs for x in differentiable(value)[0]]
    grads = [leaf.grad for value in leaves for leaf in differentiable(value)[0]]
    arrived = [(x, dx) for x, dx in zip(tensors, grads, strict=True) if dx is not None]
    if arrived:
        torch.autograd.backward([x for x, _ in arrived], [dx for _, dx in arrived])
