"""Assembles the stages of a run: their layers, their ends, and the links between them.

All choices of parts are made here, once per run: ends in the graph or cut, recorded or not, first
or last stage, one device or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from pipert._typing import Value
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.call import Layers
from pipert.layers.parameter_copies import weights_elsewhere
from pipert.layers.place import Place
from pipert.layers.random_numbers import draws
from pipert.observe.event import WAIT
from pipert.schedules.action import BACKWARD, FORWARD
from pipert.skip.store import Key
from pipert.stage.actions import ACTIONS
from pipert.stage.call_boundary import CallBoundary
from pipert.stage.copies import Copies
from pipert.stage.loss import StepFunction
from pipert.stage.run import Run
from pipert.stage.stage import NOWHERE, Execute, Link, Stage, between, from_caller, to_caller
from pipert.stage.step import Step
from pipert.stage.step_boundary import StepBoundary


class Layered:
    """A model as a pipe runs it: its layers are called one by one.

    Args:
        partitions: the layers of each partition.
        skips: for each partition, the skips that it stashes and pops.
    """

    keeps_forward = False
    """Whether a ``forward`` of the model's own calls the layers: it brings to them what comes from
    any earlier partition, and weights of other devices."""

    def __init__(
        self, partitions: Sequence[nn.Sequential], skips: Sequence[tuple[Key, ...]]
    ) -> None:
        self.partitions, self.skips = tuple(partitions), tuple(skips)
        layers = chain.from_iterable(self.partitions)
        self.entry: nn.Module | None = next(layers, None)
        """The module that receives the arguments of a call; ``None`` without layers."""
        self.norm_parts: Sequence[nn.Module] = self.partitions
        """The parts whose running statistics are each noted by one worker."""

    def function_of(self, step: StepFunction | None) -> StepFunction | None:
        """Return the user's function that calls the model in a step, if there is one."""
        if step is not None:
            raise TypeError(
                "step calls the model as a whole, which a Pipe has cut into layers; make the pipe "
                "with pipert.pipeline(module, cuts), or give loss_fn"
            )
        return None

    def assemble(
        self, run: Run, inputs: list[Value], step: Step | None, stats: DeferredStats | None
    ) -> list[Stage]:
        """Make the stages of a run, as :func:`assemble` does."""
        return assemble(run, self, inputs, step, stats)


def assemble(
    run: Run,
    model: Layered,
    inputs: list[Value],
    step: Step | None,
    stats: DeferredStats | None,
    forward: Execute = ACTIONS[FORWARD],
) -> list[Stage]:
    """Make the stages of ``run``, which goes backward as well if there is a ``step``.

    The run empties ``inputs``, one value per micro-batch, as it proceeds. Deferred running
    statistics are noted in ``stats``. ``forward`` carries out ``F``.
    """
    n = len(model.partitions)
    weights = weights_elsewhere(model.partitions, () if model.keeps_forward else run.devices)
    places = [Place(j, n, run.plan.m, run.devices[j]) for j in range(n)]
    exit_link = to_caller(run.outputs) if step is None else NOWHERE
    values = [from_caller(inputs), *[_between(run, place) for place in places[1:]], exit_link]
    gradients = [NOWHERE, *[_between(run, place) for place in places[:-1]], NOWHERE]
    actions = {**ACTIONS, FORWARD: forward}
    stages = []
    for j, (partition, place) in enumerate(zip(model.partitions, places, strict=True)):
        skips = model.skips[j]
        layers = layers_for(run, partition, place, bool(skips), step)
        links = {FORWARD: (values[j], values[j + 1])}
        if step is not None:
            links[BACKWARD] = gradients[j + 1], gradients[j]
        copies = Copies(run, j, bool(skips), step is not None, model.keeps_forward)
        partition_stats = stats.partitions[j] if stats else None
        ends = _ends(run, place, copies, step, model.keeps_forward)
        stage = Stage(run, place, layers, skips, links, ends, weights[j], partition_stats)
        stage.handlers = {
            kind: stage.handler_for(kind, actions[kind]) for kind in run.plan.occurring_kinds
        }
        stages.append(stage)
    return stages


def layers_for(
    run: Any, partition: nn.Sequential, place: Place, has_skips: bool, step: Step | None
) -> Layers:
    """Make what computes a partition in a :class:`Run`, or in a mini-batch over ranks."""
    draws_loss = step is not None and place.is_last and step.loss.draws
    seed = run.seed if draws_loss or draws(partition) else None
    return Layers(partition, place, run.context, has_skips, run.trace, run.effects, seed)


def _between(run: Run, receiver: Place) -> Link:
    """Return a link; how long a receiver on CPU waits is recorded. CUDA waits in a stream."""
    link, trace = between(), run.trace
    if not trace.is_recorded or receiver.device.type == "cuda":
        return link

    def receive(i: int) -> Value:
        with trace.during(WAIT, i, receiver.j, receiver.device):
            return link.receive(i)

    return link._replace(receive=receive)


def _ends(
    run: Run, place: Place, copies: Copies, step: Step | None, keeps_forward: bool
) -> CallBoundary | StepBoundary:
    if step is None:
        grad = run.context.grad_enabled
        in_turn = keeps_forward or len(set(run.devices)) == 1
        # The last micro-batch goes backward first. It needs a turn where its nodes compete with
        # others: with the caller's in the last partition, with its own where there are no joins.
        forks_last = keeps_forward or in_turn and (place.m == 1 or place.is_last)
        return CallBoundary(place.device, place.m - 1, grad, copies, in_turn, forks_last)
    return StepBoundary(step, run, place, copies)
