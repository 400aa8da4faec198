"""Putting the stages of a run together: layers, ends, and the links between them.

What a run is decides here, once, what its stages are made of: in the graph or cut, recorded or not,
first or last, on one device or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from pipert._typing import Value
from pipert.layers.batchnorm import DeferredStats
from pipert.layers.buffers import kept_counters
from pipert.layers.call import Layers, RandomLayers
from pipert.layers.drawing import draws
from pipert.layers.place import Place
from pipert.layers.tied import Weights, borrowed, hooked
from pipert.skip.routes import PartitionSkips
from pipert.stage.actions import ACTIONS
from pipert.stage.copies import Copies
from pipert.stage.cut import Cut
from pipert.stage.ends import Ends
from pipert.stage.in_graph import InGraph
from pipert.stage.links import NOWHERE, Between, FromCaller, Link, ToCaller
from pipert.stage.recorded import (
    LookAfterSending,
    RecordedEnds,
    RecordedLink,
    RecordedTransport,
)
from pipert.stage.run import Run
from pipert.stage.stage import Links, Stage
from pipert.stage.step import Step
from pipert.stage.transport import CutTransport, InGraphTransport, Transport

__all__: list[str] = []


class Model(NamedTuple):
    """What a pipe runs: layers, and where their skips go."""

    partitions: tuple[nn.Sequential, ...]
    skips: tuple[PartitionSkips, ...]


def assemble(
    run: Run, model: Model, inputs: list[Value], step: Step | None, stats: DeferredStats | None
) -> list[Stage]:
    """Make the stages of ``run``.

    Args:
        run: the run.
        model: its layers.
        inputs: of each micro-batch; emptied as the run goes on.
        step: if it goes backward as well.
        stats: where running statistics are noted, if they are deferred.
    """
    n = len(model.partitions)
    weights = _borrowed(run, model, step)
    there = [FromCaller(inputs), *_between(n), ToCaller(run.outputs) if step is None else NOWHERE]
    back = [NOWHERE] * (n + 1) if step is None else [NOWHERE, *_between(n), NOWHERE]
    stages = []
    for j, partition in enumerate(model.partitions):
        place, skips = Place(j, n, run.plan.m, run.devices[j]), model.skips[j]
        links = _recorded(run, place, Links(there[j], there[j + 1], back[j], back[j + 1]))
        if step is None:
            parts = _in_graph(run, place, skips, links)
        else:
            parts = _cut(run, place, skips, links, step)
        layers = _layers(run, partition, place, skips, step)
        of_stage = stats.partitions[j] if stats else None
        stage = Stage(run, place, layers, skips, *parts, weights[j], of_stage)
        stage.how = {kind: ACTIONS[kind](stage) for kind in run.plan.kinds_there_are}
        stages.append(stage)
    return stages


def _layers(
    run: Run, partition: nn.Sequential, place: Place, skips: PartitionSkips, step: Step | None
) -> Layers:
    draws_loss = step is not None and place.j == place.n - 1 and step.loss.draws
    if draws_loss or draws(partition) or kept_counters.get() is not None:
        return RandomLayers(run.seed, partition, place, run.context, skips, run.told)
    return Layers(partition, place, run.context, skips, run.told)


def _between(n: int) -> list[Link]:
    return [Between() for _ in range(n - 1)]


def _borrowed(run: Run, model: Model, step: Step | None) -> Sequence[Weights]:
    """The parameters of each partition that something else stands for."""
    elsewhere = borrowed(model.partitions, run.devices)
    if step is None:
        return elsewhere
    pairs = zip(model.partitions, elsewhere, strict=True)
    return [(*others, *hooked(partition, others)) for partition, others in pairs]


class Parts(NamedTuple):
    """What differs between a call and a step."""

    links: Links
    ends: Ends
    cut: Cut | None


def _in_graph(run: Run, place: Place, skips: PartitionSkips, links: Links) -> Parts:
    grad, recorder = run.context.grad_enabled, run.told.recorder
    transport = _transport(run, place, InGraphTransport(place.device, grad))
    ends = InGraph(place.device, place.m - 1, grad, Copies(run, place.j, skips, transport))
    if recorder is None or not grad:
        return Parts(links, ends, None)
    recorded = RecordedEnds(ends, recorder, place)
    return Parts(links._replace(y=LookAfterSending(links.y, recorded)), recorded, None)


def _cut(run: Run, place: Place, skips: PartitionSkips, links: Links, step: Step) -> Parts:
    transport = _transport(run, place, CutTransport(place.device))
    copies = Copies(run, place.j, skips, transport)
    cut = Cut(step, place.j == place.n - 1, place, run.seed, copies)
    return Parts(links, cut, cut)


def _transport(run: Run, place: Place, plain: Transport) -> Transport:
    recorder = run.told.recorder
    return plain if recorder is None else RecordedTransport(plain, recorder, place)


def _recorded(run: Run, place: Place, links: Links) -> Links:
    """Let the waiting for inputs be seen; a CUDA device waits later, in its stream."""
    recorder = run.told.recorder
    if recorder is None or place.device.type == "cuda":
        return links
    x, dy = (
        RecordedLink(link, recorder, place) if isinstance(link, Between) else link
        for link in (links.x, links.dy)
    )
    return links._replace(x=x, dy=dy)
