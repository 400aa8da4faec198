"""Runs one mini-batch over several ranks.

1. All ranks report what they were called with, such as the rows of the inputs on the first and of
   the target on the last. If the reports do not fit together, all raise before anything is sent.
2. torch's schedule runs. It is kept for further mini-batches of as many micro-batches.
3. All ranks report whether they succeeded. Only then are gradients accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import ScheduleGPipe, ScheduleLoopedBFS
from torch.distributed.pipelining.schedules import get_schedule_class

from pipert._typing import Value
from pipert.batch.joining import gather
from pipert.batch.tensors import differentiable
from pipert.distributed.rank_messages import RankError, RankPlace
from pipert.distributed.rank_parameters import (
    EarlierGradients,
    SharedParameters,
    TiedParameter,
    sum_tied,
)
from pipert.distributed.rank_reports import RankSettings, check, prepare, share
from pipert.distributed.rank_stage import RankBatch, RankPartition, RankStage, StageModule
from pipert.distributed.replay_model import ReplayLayers, ReplayModel
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.call import Layers
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed, draws
from pipert.observe.run_trace import Trace
from pipert.schedules.plan import plan, plan_call, recomputed
from pipert.skip.store import Key, of_task
from pipert.stage.loss_checks import LossChecks, StepCall
from pipert.stage.step import Step
from pipert.stage.step_boundary import leaf_inputs
from pipert.workers.context import CallerContext

Prepared = tuple[Any, list[tuple[RankStage, RankPartition]]]
"""torch's schedule, and the stages with what they compute."""


class RankParts(NamedTuple):
    """A model split into partitions, with this rank's on their device."""

    replayed: ReplayModel | None
    """What replays the model's own forward; ``None`` for an ``nn.Sequential``."""
    placement: list[int]
    """For each partition, the index of its rank within the pipeline."""
    modules: dict[int, StageModule]
    """This rank's partitions, by number."""
    skips: Sequence[Mapping[int, Key]]
    """For each partition, the skips that it stashes and pops, by numbers that ranks agree on."""
    shared: SharedParameters
    layout: int
    """A checksum of the names, shapes and dtypes of all the model's parameters."""


SCHEDULES = 64
"""How many of torch's schedules are kept, by the number of micro-batches."""


@dataclass(eq=False)
class RankRuntime:
    """Runs mini-batches on this rank's partitions. All ranks call its methods together."""

    site: RankPlace
    parts: RankParts
    wrapped: dict[int, nn.Module]
    """The modules that torch's stages call in place of this rank's partitions."""
    tied: Sequence[TiedParameter]
    """The parameters that this rank shares with others."""

    def __post_init__(self) -> None:
        self.trace, self._checks = Trace(), LossChecks()
        layers = [layer for part in self.parts.modules.values() for layer in part.modules()]
        self._sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
        self._schedules: dict[tuple[str, int, bool], tuple[Any, list[RankStage]]] = {}

    def run(
        self, call: StepCall, is_step: bool, settings: RankSettings
    ) -> tuple[Tensor | None, Value]:
        """Run a mini-batch: forward, and backward if it is a step.

        Returns:
            The loss of a step, and the outputs if they are wanted and this is the last rank: of
            micro-batches that came ready a list with the output of each.
        """
        site, modules, replayed = self.site, self.parts.modules, self.parts.replayed
        inputs_of = "first" if replayed is None else replayed.inputs
        with site.agreement.agreeing("a mini-batch") as reports:
            tied = {one.number: one.parameter.requires_grad for one in self.tied}
            report, inputs, make_loss = prepare(
                site, modules, inputs_of, call, is_step, settings, tied, self._checks
            )
            reports.append(report)
        check(site, reports)
        first = site.agreement.of(site.homes[0], reports)
        arrived = share(site, inputs) if inputs_of == "shared" else None
        m, n = len(first.sizes), len(site.homes)
        seed = RunSeed()
        seed.draw(first.seed)  # on all ranks, whatever fails
        planned = plan("gpipe", m, n) if is_step else plan_call(m, n, range(n))
        earlier, stats = None, None
        with self.trace.open(planned) as trace:
            try:
                with site.agreement.agreeing():
                    if arrived is not None:
                        inputs = arrived.rebuild(tuple(arrived.tensors))
                    # Also in a forward: a new stage of torch drops gradients of sharded parameters.
                    earlier = EarlierGradients(self.wrapped.values())
                    sizes = first.sizes if call.microbatches is None else ()
                    step = None
                    if make_loss is not None:
                        step = Step(make_loss(m, sizes), call.return_outputs)
                    given = [*inputs, *(() if step is None else step.loss.targets)]
                    leaves = [leaf_inputs(x) for x in given] if is_step else given
                    if step is not None:
                        step.loss.targets = leaves[len(inputs) :]
                    context = CallerContext([site.device] if site.device.type == "cuda" else [])
                    context.set_variable(of_task, None)
                    batch = RankBatch(
                        m, sizes, leaves[: len(inputs)],
                        recomputed(settings.checkpoint, m) if is_step else 0,
                        seed, trace, context, step, bool(self._sharded),
                    )  # fmt: skip
                    if replayed is not None:
                        replayed.prepare(batch)
                    # After recordings, which write to buffers and restore them.
                    stats = DeferredStats([*modules.values()]) if settings.deferred else None
                    prepared = self._prepared(settings.schedule, batch, stats, is_step)
                result = self._go(prepared, batch, earlier, is_step)
                trace.outcome = "succeeded"
            except BaseException as error:
                if isinstance(error, Exception):  # an interrupt leaves it cancelled
                    trace.outcome = "failed"
                if earlier is not None:
                    earlier.restore()
                raise
        if stats is not None:
            stats.commit()
        if is_step:
            _deliver(given, leaves)
        return result

    def _partitions(
        self, batch: RankBatch, stats: DeferredStats | None
    ) -> Iterator[RankPartition]:
        """Make the objects that compute this rank's partitions in this mini-batch."""
        n = len(self.site.homes)
        for k, (j, module) in enumerate(self.parts.modules.items()):
            place = Place(j, n, batch.m, self.site.device)
            skips = self.parts.skips[j]
            draws_loss = place.is_last and batch.step is not None and batch.step.loss.draws
            about = place, batch.context, bool(skips), batch.trace, batch.effects
            seed = batch.seed if draws_loss or draws(module) else None
            layers: Any = Layers(module, *about, seed)
            if self.parts.replayed is not None:
                layers = ReplayLayers(self.parts.replayed, place, layers, batch)
            own_stats = None if stats is None else stats.partitions[k]
            yield RankPartition(batch, place, layers, own_stats, skips)

    def _prepared(
        self, name: str, batch: RankBatch, stats: DeferredStats | None, is_step: bool
    ) -> Prepared:
        """Return torch's schedule, which is kept for as many micro-batches, and its stages."""
        key = name, batch.m, is_step
        if key not in self._schedules:
            modules = self.parts.modules
            stages = [
                RankStage(modules[j], wrapped, j, self.site) for j, wrapped in self.wrapped.items()
            ]
            # The last partition computes the loss itself.
            loss_fn = (lambda loss, _: loss) if is_step else None
            if len(self._schedules) == SCHEDULES:
                self._schedules.clear()
            self._schedules[key] = make_schedule(name, stages, batch.m, loss_fn), stages
        schedule, stages = self._schedules[key]
        return schedule, [*zip(stages, self._partitions(batch, stats), strict=True)]

    def _go(
        self, prepared: Prepared, batch: RankBatch, earlier: EarlierGradients, is_step: bool
    ) -> tuple[Tensor | None, Value]:
        """Run torch's schedule, and accumulate gradients if all ranks succeeded.

        Returns:
            The loss of a step, and the outputs.
        """
        agreement, home_of_loss = self.site.agreement, self.site.homes[-1]
        self._run_schedule(prepared, batch)
        loss, outputs = self._result(prepared, batch)
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
            sum_tied(self.tied, self.site.group)
        earlier.add()
        return loss, outputs

    def _run_schedule(self, prepared: Prepared, batch: RankBatch) -> None:
        schedule, stages = prepared
        numbers = {} if batch.step is None else {"target": torch.arange(batch.m)}
        for stage, partition in stages:
            stage.begin(partition)
        try:
            with self.site.agreement.talking(batch.at):
                schedule.step(**numbers, return_outputs=False)
                for work in filter(None, batch.sent):
                    work.wait()
        except RankError:
            if batch.failure is None:
                raise
            raise batch.take_failure()[0] from None  # type: ignore[misc]
        finally:
            for stage, _ in stages:
                stage.end()

    def _result(self, prepared: Prepared, batch: RankBatch) -> tuple[Tensor, Value]:
        """Return the loss and the outputs; on all ranks but the last, placeholders."""
        loss, outputs = torch.ones((), device=self.site.device), None
        try:
            if not batch.is_failed:
                batch.effects.check()
                for stats in filter(None, [partition.stats for _, partition in prepared[1]]):
                    stats.refuse_other_updates()
                if batch.step is not None:
                    batch.step.check()
                    loss, outputs = batch.step.total(), batch.step.output
                elif batch.outputs:
                    outputs = [batch.outputs[i] for i in range(batch.m)]
                    outputs = gather(outputs, batch.sizes) if batch.sizes else outputs
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


_SINGLE = ("gpipe", "1f1b")  # with one partition on each rank
_V_SHAPED = "zbvzerobubble"  # with two
_SPLITTING = ("interleavedzerobubble", _V_SHAPED)
NAMES = ("gpipe", "1f1b", "interleaved", "InterleavedZeroBubble", "ZBVZeroBubble")


def check_schedule(schedule: Any, n: int, ranks: int, checkpoint: str) -> str:
    """Check that a schedule fits ``n`` partitions on that many ranks; return its name."""
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule must be one of {list(NAMES)}, got {schedule!r}: torch's runtime takes no "
            "plan of yours by a public name; a pipert.Pipe does"
        )
    name = schedule.lower()
    if name not in map(str.lower, NAMES):
        raise ValueError(f"schedule must be one of {list(NAMES)}, got {schedule!r}")
    needed, fits = "a multiple of the ranks", n % ranks == 0
    if name in _SINGLE:
        needed, fits = "one partition on each rank", n == ranks
    if name == _V_SHAPED:
        needed, fits = "two partitions on each rank", n == 2 * ranks
    if not fits:
        raise ValueError(
            f"schedule {schedule!r} needs {needed}, but there are {n} partitions for {ranks} "
            "ranks; 'interleaved' takes any multiple"
        )
    if name in _SPLITTING and checkpoint != "never":
        raise ValueError(
            f"schedule {schedule!r} puts gradients of weights off, which a backward that recomputes"
            f" cannot; use checkpoint='never', or another schedule (checkpoint is {checkpoint!r})"
        )
    return "1f1b" if name == "interleaved" and n == ranks else name


def ranks_of(name: str, n: int, ranks: int) -> list[int]:
    """Return for each partition the index of its rank within the pipeline."""
    if name == _V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [j % ranks for j in range(n)]


def make_schedule(
    name: str, stages: list[RankStage], m: int, loss_fn: Callable[..., Any] | None
) -> Any:
    """Make torch's schedule for ``m`` micro-batches; forward only without a ``loss_fn``."""
    made: Any = get_schedule_class("Interleaved1F1B" if name == "interleaved" else name)
    if name in _SINGLE:
        if loss_fn is None or m < stages[0].num_stages:
            made = ScheduleGPipe  # with so few micro-batches 1F1B is the same
        return made(stages[0], m, loss_fn=loss_fn, scale_grads=False)
    if loss_fn is None and name != _V_SHAPED:
        made = ScheduleLoopedBFS
    return made(stages, m, loss_fn=loss_fn, scale_grads=False)
