"""Carries out ``F[i,j]``: turns the input of a stage into its output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from pipert._typing import Value
from pipert.batch.tensors import Carried
from pipert.layers.call import AfterLayer
from pipert.schedules.action import FORWARD
from pipert.stage.shared_memory import compute_watching
from pipert.stage.stage import Execute, How, Stage, observed

__all__: list[str] = []


def forward(stage: Stage, compute: Execute) -> How:
    """Return how ``stage`` carries out ``F``; ``compute`` is or wraps :func:`compute_layers`."""
    body = observed(stage, FORWARD, partial(_forward, compute))
    return How(stage.links.x.receive, stage.run.context.on_worker, body, stage.links.y.send)


def _forward(compute: Execute, stage: Stage, i: int, x: Value) -> Value:
    """Enter the stage, compute, and leave; receive arriving skips and send leaving ones."""
    if stage.borrowed:
        stage.borrow(i)
    if stage.skips is None:
        if not isinstance(x, Tensor):
            stage.find_shared(i, x)
        x = stage.ends.enter(i, x)
        return stage.ends.leave(i, compute(stage, i, x))
    skips, j = stage.run.skips, stage.place.j
    x = Carried(x, tuple([skips.receive(key, i, j) for key, _ in stage.skips.arriving]))
    stage.find_shared(i, x)
    x = stage.ends.enter(i, x)
    y, leaving = stage.ends.leave(i, compute(stage, i, x))
    for (key, k), value in zip(stage.skips.leaving, leaving, strict=True):
        skips.send(key, i, k, value)
    return y


def compute_layers(stage: Stage, i: int, x: Value, after_layer: AfterLayer = None) -> Value:
    """Compute the layers, and in the last stage of a step the loss."""
    checkpointed = i < stage.recomputed
    compute: Callable[[Value], Value]
    compute = partial(stage.layers.forward, i, checkpointed, after_layer)
    if stage.shared:
        compute = partial(compute_watching, stage.shared, partial(stage.hand_on, i), compute)
    if checkpointed:
        # It outlives the run, so it must reference neither the stage nor the run.
        replay = partial(stage.layers.recompute, i)
        compute = partial(stage.ends.checkpoint, replay, compute)
    if stage.stats is None:
        y = compute(x)
    else:
        with stage.stats.collecting():
            y = compute(x)
    return y if stage.loss is None else stage.loss(i, y)
