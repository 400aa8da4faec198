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
from pipert.layers.call import Layers
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
        place = Place(j, n, run.plan.m, run.devices[j])
        ends = _ends(run, model.skips[j], place, step)
        seed = run.seed if draws(partition) else None
        stage = Stage(
            run,
            place,
            Layers(partition, place, run.context, seed, model.skips[j], run.told),
            model.skips[j],
            _links(run, place, ends, Links(there[j], there[j + 1], back[j], back[j + 1])),
            ends,
            weights[j],
            stats.partitions[j] if stats else None,
        )
        stage.how = {kind: ACTIONS[kind](stage) for kind in run.plan.kinds_there_are}
        stages.append(stage)
    return stages


def _between(n: int) -> list[Link]:
    return [Between() for _ in range(n - 1)]


def _borrowed(run: Run, model: Model, step: Step | None) -> Sequence[Weights]:
    """The parameters of each partition that something else stands for."""
    elsewhere = borrowed(model.partitions, run.devices)
    if step is None:
        return elsewhere
    pairs = zip(model.partitions, elsewhere, strict=True)
    return [(*others, *hooked(partition, others)) for partition, others in pairs]


def _ends(run: Run, skips: PartitionSkips, place: Place, step: Step | None) -> Ends:
    grad, recorder, ends = run.context.grad_enabled, run.told.recorder, None
    transport: Transport = CutTransport(place.device)
    if step is None:
        transport = InGraphTransport(place.device, grad)
    if recorder is not None:
        transport = RecordedTransport(transport, recorder, place)
    copies = Copies(run, place.j, skips, transport)
    if step is not None:
        return Cut(step, place.j == place.n - 1, place, run.seed, copies)
    ends = InGraph(place.device, place.m - 1, grad, copies)
    return ends if recorder is None or not grad else RecordedEnds(ends, recorder, place)


def _links(run: Run, place: Place, ends: Ends, links: Links) -> Links:
    recorder = run.told.recorder
    if recorder is None:
        return links
    x, y, dx, dy = links
    if place.device.type != "cuda":  # it waits later, in its stream
        x = RecordedLink(x, recorder, place) if place.j > 0 else x
        dy = RecordedLink(dy, recorder, place) if dy is not NOWHERE else dy
    if isinstance(ends, RecordedEnds):
        y = LookAfterSending(y, ends)
    return Links(x, y, dx, dy)
