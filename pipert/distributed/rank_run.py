"""Runs one mini-batch over several ranks.

1. All ranks report what they were called with, such as the rows of the inputs on the first and of
   the target on the last. If the reports do not fit together, all raise before anything is sent.
2. torch's schedule runs. It is kept for further mini-batches of as many micro-batches.
3. All ranks report whether they succeeded. Only then are gradients accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pipert._typing import Value
from pipert.batch.joining import gather
from pipert.batch.microbatch import Batch, batch_of_step, ready, scatter_with_sizes
from pipert.batch.tensors import differentiable, tensors_of
from pipert.distributed.rank_messages import RankError, RankPlace, checksum_of, share
from pipert.distributed.rank_parameters import (
    EarlierGradients,
    SharedParameters,
    check_tied,
    sum_tied,
    tie,
)
from pipert.distributed.rank_stage import RankBatch, RankStage, StageModule, make_schedule
from pipert.distributed.replay_model import ReplayLayers, ReplayModel
from pipert.layers.batchnorm import DeferredStats, PartitionStats
from pipert.layers.compiling import refuse_tracers
from pipert.layers.modules import compute_cached
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed, next_seed
from pipert.observe.run_trace import Trace
from pipert.schedules.plan import plan, plan_call, recomputed
from pipert.skip.store import Key, of_task
from pipert.stage.assembly import layers_for
from pipert.stage.loss import Loss
from pipert.stage.loss_checks import (
    LossChecks,
    StepCall,
    check_step,
    denominator_of,
    scale_of,
)
from pipert.stage.step import Step
from pipert.stage.step_boundary import leaf_inputs
from pipert.workers.context import CallerContext


class RankSettings(NamedTuple):
    """The settings of a pipe for one mini-batch; the same on all ranks."""

    chunks: int
    checkpoint: str
    schedule: str
    deferred: bool


class RankReport(NamedTuple):
    """What a rank tells the others before a mini-batch."""

    in_common: tuple[Any, ...]
    """The call and the settings, which all ranks must have in common."""
    tied: dict[int, bool]
    """Whether each weight that this rank shares with others requires grad, by its number."""
    replica: Sequence[int]
    seed: int
    """The seed of the random numbers; the first rank's is used."""
    sizes: Sequence[int] = ()
    """The number of rows in each micro-batch, from the first rank."""
    target_sizes: Sequence[int] = ()
    """Likewise of the target, if it has rows, from the last rank."""
    checksum: int = 0
    """Of the arguments, where all ranks of this pipeline must give the same."""


class RankParts(NamedTuple):
    """A model split into partitions, with this rank's on their device."""

    replayed: ReplayModel | None
    """What replays the model's own forward; ``None`` for an ``nn.Sequential``."""
    modules: dict[int, StageModule]
    """This rank's partitions, by number."""
    skips: Sequence[Mapping[int, Key]]
    """For each partition, the skips that it stashes and pops, by numbers that ranks agree on."""
    shared: SharedParameters


Wrap = Callable[[nn.Sequential], nn.Module | None]


class RankRuntime:
    """Runs mini-batches on this rank's partitions. All ranks make it and call its methods together.

    Args:
        site: the ranks.
        parts: the model.
        wrap: returns what torch's stages call in place of one of this rank's partitions.
    """

    def __init__(self, site: RankPlace, parts: RankParts, wrap: Wrap | None) -> None:
        self.site, self.parts = site, parts
        self.tied = tie(parts.shared, site)
        with site.agreement.agreeing():
            self.wrapped = {j: wrap and wrap(part) or part for j, part in parts.modules.items()}
            check_tied(self.tied, parts.modules.values())
        self._inputs_of = "first" if parts.replayed is None else parts.replayed.inputs
        self.trace, self._checks = Trace(), LossChecks()
        layers = [layer for part in self.parts.modules.values() for layer in part.modules()]
        self._sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
        self._schedules: dict[tuple[int, bool], tuple[Any, list[RankStage]]] = {}

    def run(
        self, call: StepCall, is_step: bool, settings: RankSettings
    ) -> tuple[Tensor | None, Value]:
        """Run a mini-batch: forward, and backward if it is a step.

        Returns:
            The loss of a step, and the outputs if they are wanted and this is the last rank: of
            micro-batches that came ready a list with the output of each.
        """
        site, modules, replayed = self.site, self.parts.modules, self.parts.replayed
        with site.agreement.agreeing("a mini-batch") as reports:
            report, inputs, make_loss = self._prepare(call, is_step, settings)
            reports.append(report)
        check(site, reports)
        first = site.agreement.of(site.homes[0], reports)
        arrived = share(site, inputs) if self._inputs_of == "shared" else None
        m, n = len(first.sizes), len(site.homes)
        seed = RunSeed()
        seed.draw(first.seed)  # on all ranks, whatever fails
        planned = plan("gpipe", m, n) if is_step else plan_call(m, n, range(n))
        earlier, stats, stages = None, None, list[RankStage]()
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
                        batch.records = [replayed.record_of(x) for x in batch.inputs]
                    # After recordings, which write to buffers and restore them.
                    stats = DeferredStats([*modules.values()]) if settings.deferred else None
                    schedule, stages = self._scheduled(settings.schedule, m, is_step)
                    for k, stage in enumerate(stages):
                        self._begin(stage, batch, None if stats is None else stats.partitions[k])
                result = self._go(schedule, stages, batch, earlier, is_step)
                trace.outcome = "succeeded"
            except BaseException as error:
                if isinstance(error, Exception):  # an interrupt leaves it cancelled
                    trace.outcome = "failed"
                if earlier is not None:
                    earlier.restore()
                raise
            finally:
                for stage in stages:
                    stage.end()
        if stats is not None:
            stats.commit()
        if is_step:
            _deliver(given, leaves)
        return result

    def _prepare(
        self, call: StepCall, is_step: bool, settings: RankSettings
    ) -> tuple[RankReport, list[Value], Callable[[int, Sequence[int]], Loss] | None]:
        """Check what this rank has for a mini-batch, and split it into micro-batches.

        Returns:
            The report; the input of each micro-batch, where this rank's count; and on the last one
            of a step what makes the loss, from the number of micro-batches and of rows in each.
        """
        refuse_tracers()
        site, modules, inputs_of = self.site, self.parts.modules, self._inputs_of
        compute_cached(modules.values())
        device = site.device
        inputs: list[Value] = []
        sizes: Sequence[int] = ()
        target_sizes: Sequence[int] = ()
        kind, loss_of_sizes, checksum = "forward", None, 0
        if 0 in modules or inputs_of == "everywhere":
            given = call.args, call.kwargs, None, call.chunks, call.microbatches
            batch = batch_of_step(*given, as_arguments=True)
            inputs, sizes = batch.inputs, batch.sizes or [1] * len(batch.inputs)
            if inputs_of == "everywhere":
                checksum = checksum_of(inputs)
            if inputs_of != "first":
                inputs = _for_all(inputs, device)
        if is_step:
            function = check_step(call.loss_fn, call.reduction)
            scale = scale_of(call.loss_scale, device)
            # Reading a scale on a GPU would wait for the GPU.
            value = "on a GPU" if isinstance(scale, Tensor) and scale.is_cuda else float(scale)
            shown = None if call.loss_scale is None else value
            kind = f"forward_backward with reduction={call.reduction!r} and loss_scale={shown}"
            if len(site.homes) - 1 in modules:
                denominator = denominator_of(call.denominator, device)
                targets, target_sizes = _split_target(call)

                def make_loss(m: int, sizes: Sequence[int]) -> Loss:
                    each = list(targets) if target_sizes else [targets[0]] * m
                    watch = self._checks.of_step(call, Batch(each, each, sizes))
                    how = call.reduction, denominator, scale
                    return Loss(function, each, sizes, *how, watch)

                loss_of_sizes = make_loss
        mode = "training" if any(m.training for m in modules.values()) else "evaluation"
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        is_ready = "micro-batches" if call.microbatches is not None else "arguments"
        in_common = kind, is_ready, mode, f"autocast={autocast}", *settings
        tied = {one.number: one.parameter.requires_grad for one in self.tied}
        told = tied, site.replica, next_seed(), sizes, target_sizes, checksum
        return RankReport(in_common, *told), inputs, loss_of_sizes

    def _scheduled(self, name: str, m: int, is_step: bool) -> tuple[Any, list[RankStage]]:
        """Return torch's schedule, which is kept for as many micro-batches, and its stages."""
        if (m, is_step) not in self._schedules:
            parts = self.parts
            stages = [
                RankStage(parts.modules[j], wrapped, j, self.site, parts.skips[j])
                for j, wrapped in self.wrapped.items()
            ]
            # The last partition computes the loss itself.
            loss_fn = (lambda loss, _: loss) if is_step else None
            self._schedules[m, is_step] = make_schedule(name, stages, m, loss_fn), stages
        return self._schedules[m, is_step]

    def _begin(self, stage: RankStage, batch: RankBatch, stats: PartitionStats | None) -> None:
        """Begin a mini-batch in a stage, with the object that computes its layers."""
        j, parts = stage.stage_index, self.parts
        place = Place(j, len(self.site.homes), batch.m, self.site.device)
        skips = bool(parts.skips[j])
        layers: Any = layers_for(batch, parts.modules[j], place, skips, batch.step)
        if parts.replayed is not None:
            layers = ReplayLayers(parts.replayed, place, layers, batch)
        stage.begin(batch, place, layers, stats)

    def _go(
        self, schedule: Any, stages: list[RankStage], batch: RankBatch, earlier: EarlierGradients,
        is_step: bool,
    ) -> tuple[Tensor | None, Value]:  # fmt: skip
        """Run torch's schedule, and accumulate gradients if all ranks succeeded.

        Returns:
            The loss of a step, and the outputs.
        """
        agreement, home_of_loss = self.site.agreement, self.site.homes[-1]
        numbers = {} if batch.step is None else {"target": torch.arange(batch.m)}
        try:
            with agreement.talking():
                schedule.step(**numbers, return_outputs=False)
                for work in filter(None, batch.sent):
                    work.wait()
        except RankError:
            if batch.failure is None:
                raise
            raise batch.take_failure()[0] from None  # type: ignore[misc]
        loss, outputs = self._result(stages, batch)
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

    def _result(self, stages: list[RankStage], batch: RankBatch) -> tuple[Tensor, Value]:
        """Return the loss and the outputs; on all ranks but the last, placeholders."""
        loss, outputs = torch.ones((), device=self.site.device), None
        try:
            if not batch.is_failed:
                batch.effects.check()
                for stats in filter(None, [stage.stats for stage in stages]):
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


def _split_target(call: StepCall) -> tuple[Sequence[Value], Sequence[int]]:
    """Return the target of each micro-batch, and its rows; of none if one target is for all."""
    if call.microbatches is None or call.target is None:
        targets, sizes = scatter_with_sizes((call.target,), {}, call.chunks)
        return targets, sizes if any(x.dim() for x in tensors_of(call.target)[0]) else ()
    targets = list(ready(call.target, "target"))
    return targets, [1] * len(targets)


def _for_all(inputs: list[Value], device: torch.device) -> list[Value]:
    """Return the inputs of the micro-batches on a device, for all ranks.

    Raises:
        ValueError: an argument requires grad.
    """
    tensors, rebuild = tensors_of(inputs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "an argument requires grad, but all ranks use the arguments of any model, and no "
            "rank would have its whole gradient; compute it in the model, or pass its detach()"
        )
    found: list[Value] = rebuild(tuple([tensor.detach().to(device) for tensor in tensors]))
    return found


def check(site: RankPlace, reports: Sequence[RankReport]) -> None:
    """Raise on all ranks if their reports do not fit together."""
    site.agreement.require_same("call and settings", [one.in_common for one in reports])
    tied: dict[int, bool] = {}
    if any(tied.setdefault(*pair) != pair[1] for one in reports for pair in one.tied.items()):
        raise ValueError(
            "a weight that several ranks share must require grad on all of them or on none; "
            "call requires_grad_() of it on each"
        )
    inputs: dict[Any, int] = {}
    if any(inputs.setdefault((*one.replica,), one.checksum) != one.checksum for one in reports):
        raise ValueError(
            "with inputs='everywhere' all ranks must give the same arguments, but they differ "
            "between ranks; seed what loads and shuffles them alike, or take inputs='first'"
        )
    rows = {(*one.replica,): one.sizes for one in reports if one.sizes}
    counts = list(map(len, rows.values()))
    if len(set(counts)) > 1:
        raise ValueError(
            "replicas must have as many micro-batches, but have "
            f"{' and '.join(map(str, counts))}; give each as many rows as the pipe has chunks, "
            "or leave the last batch out"
        )
    for one in reports:
        given, target = rows[*one.replica], one.target_sizes
        if target and target != given:
            raise ValueError(
                "arguments and target must have the same number of rows, but the arguments on "
                f"the first rank have {sum(given)} and the target on the last has {sum(target)}"
            )
