"""Computes the layers of a stage in ``F[i,j]``."""

from __future__ import annotations

from functools import partial

from pipert._torch import node_count
from pipert._typing import Value
from pipert.batch.tensors import differentiable
from pipert.layers.call import AfterLayer
from pipert.observe.backward import makers, watch_nodes
from pipert.schedules.action import FORWARD, Action
from pipert.stage.shared_memory import compute_watching
from pipert.stage.stage import Stage

__all__: list[str] = []


def compute(stage: Stage, i: int, x: Value) -> Value:
    """Compute the layers, and in the last stage of a step the loss; record that, if asked to.

    In a call the nodes of ``B[i,j]`` are watched as well, since it is no task. The walk that finds
    them comes after the output has been sent, so that no stage waits for it.
    """
    notifier, recorder = stage.run.notifier, stage.run.notifier.recorder
    if recorder is None:
        return _compute(stage, i, x)
    j, device = stage.place.j, stage.place.device
    inputs, first = makers(differentiable(x)[0]), node_count()
    with notifier.recorded(Action(FORWARD, i, j), device) as span:
        y = _compute(stage, i, x, recorder.after_layer(span))
    if stage.cut is None and stage.run.context.grad_enabled:
        outputs, made = makers(differentiable(y)[0]) - inputs, range(first, node_count())
        watch = partial(watch_nodes, recorder, i, j, device, outputs, inputs, made)
        stage.after_sending.append(watch)
    return y


def _compute(stage: Stage, i: int, x: Value, after_layer: AfterLayer = None) -> Value:
    if stage.stats is None:
        y = _compute_layers(stage, i, x, after_layer)
    else:
        with stage.stats.collecting():
            y = _compute_layers(stage, i, x, after_layer)
    return y if stage.loss is None else stage.loss(i, y)


def _compute_layers(stage: Stage, i: int, x: Value, after_layer: AfterLayer) -> Value:
    layers = partial(_watched, stage) if stage.shared else stage.layers.forward
    if i >= stage.recomputed:
        return layers(i, False, after_layer, x)
    # It outlives the run, so it must reference neither the stage nor the run.
    replay = partial(stage.layers.recompute, i)
    return stage.ends.checkpoint(replay, partial(layers, i, True, after_layer), x)


def _watched(
    stage: Stage, i: int, checkpointed: bool, after_layer: AfterLayer, x: Value
) -> Value:
    """Compute the layers; refuse changes of tensors in ``x`` that share memory."""
    forward = partial(stage.layers.forward, i, checkpointed, after_layer)
    return compute_watching(stage.shared, partial(stage.hand_on, i), forward, x)
