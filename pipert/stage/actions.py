"""The way of a micro-batch through one stage, from top to bottom.

A worker takes each action as a ``stage.Task``: it receives the input from a link, calls the
function below, and sends the result over a link::

    F[i,j]   x from stage j-1    forward      y to stage j+1
    R[i,j]                       recompute
    B[i,j]   dy from stage j+1   backward     dx to stage j-1
    W[i,j]                       weight_gradients

``R``, ``B`` and, under some schedules, ``W`` are actions of a step. In a call, ``R`` is a node of
the graph, and ``B`` autograd's own walk along it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from pipert._torch import node_count
from pipert._typing import Value
from pipert.autograd.weight_gradients import compute_later
from pipert.batch.tensors import differentiable
from pipert.layers.never_recompute import FromForward
from pipert.observe.backward import makers, watch_nodes
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.stage.backward import Gradients, differentiate_stage, gather, scatter
from pipert.stage.shared_memory import compute_watching
from pipert.stage.stage import Execute, Stage
from pipert.workers.context import NOTHING


def forward(stage: Stage, i: int, x: Value) -> Value:
    """Carry out ``F[i,j]``: turn the input of the stage into its output."""
    if stage.borrowed:
        stage.borrow(i)  # parameters that live on other devices
    if stage.skips is not None or not isinstance(x, Tensor):
        x = stage.with_arriving_skips(i, x)
    x = stage.ends.enter(i, x)  # copied here; in a call tied to F[i-1,j], in a step cut off
    is_recorded = stage.run.notifier.recorder is not None
    y = compute_recorded(stage, i, x) if is_recorded else compute(stage, i, x)
    y = stage.ends.leave(i, y)  # in a call with a node for R[i,j]; in a step cut off
    return y if stage.skips is None else stage.without_leaving_skips(i, y)


def compute(stage: Stage, i: int, x: Value) -> Value:
    """Compute the layers, checkpointed or not, and in the last stage of a step the loss."""
    layers = partial(_watched, stage) if stage.shared else stage.layers.forward
    with NOTHING if stage.stats is None else stage.stats.collecting():
        if i >= stage.recomputed:
            y = layers(i, None, x)
        else:
            # They outlive the run, so they must reference neither the stage nor the run.
            kept = stage.layers.to_recompute(i)
            replay = partial(stage.layers.recompute, i, kept)
            compute = partial(layers, i, kept)
            y = stage.ends.checkpoint(replay, compute, x, not kept.exempt)
    return y if stage.loss is None else stage.loss(i, y)


def recompute(stage: Stage, i: int, _: Value) -> None:
    """Carry out ``R[i,j]`` of a step: build the graph that a checkpointed ``F[i,j]`` has not."""
    cut = stage.cut
    assert cut is not None
    kept = cut.kept.get(i)
    if kept is not None and kept.checkpoint is not None:
        kept.checkpoint.refill(True)


def backward(stage: Stage, i: int, dy: Gradients) -> Gradients:
    """Carry out ``B[i,j]`` of a step: turn the gradients of outputs into those of inputs."""
    cut = stage.cut
    assert cut is not None
    kept = cut.kept.pop(i, None)
    if kept is None:
        return ()
    dys = gather(stage, cut, i, dy, kept)  # of the output and of leaving skips, or of the loss
    dxs = differentiate_stage(stage, cut, i, kept, dys)  # sums up those of the weights
    return scatter(stage, cut, i, dxs, kept)  # those of arriving skips go straight back


def weight_gradients(stage: Stage, i: int, _: Value) -> None:
    """Carry out ``W[i,j]`` of a step: compute the gradients of weights that ``B[i,j]`` put off."""
    cut, notifier = stage.cut, stage.run.notifier
    assert cut is not None
    later = cut.later.pop(i, [])
    action, is_recorded = Action(WEIGHT, i, stage.place.j), notifier.recorder is not None
    with notifier.recorded(action, stage.place.device) if is_recorded else NOTHING:
        found = stage.layers.backward(i, compute_later, later, kind=WEIGHT)  # hooks may draw
        cut.gradients.add(*found)


def _watched(stage: Stage, i: int, kept: FromForward | None, x: Value) -> Value:
    """Compute the layers; refuse changes of tensors in ``x`` that share memory."""
    forward = partial(stage.layers.forward, i, kept)
    return compute_watching(stage.shared, partial(stage.hand_on, i), forward, x)


def compute_recorded(stage: Stage, i: int, x: Value) -> Value:
    """Compute the layers, and record that.

    In a call the nodes of ``B[i,j]`` are watched as well, since it is no task. The walk that finds
    them comes after the output has been sent, so that no stage waits for it.
    """
    notifier, recorder = stage.run.notifier, stage.run.notifier.recorder
    assert recorder is not None
    j, device = stage.place.j, stage.place.device
    inputs, first = makers(differentiable(x)[0]), node_count()
    with notifier.recorded(Action(FORWARD, i, j), device):
        y = compute(stage, i, x)
    if stage.cut is None and stage.run.context.grad_enabled:
        outputs, made = makers(differentiable(y)[0]) - inputs, range(first, node_count())
        watch = partial(watch_nodes, recorder, i, j, device, outputs, inputs, made)
        stage.after_sending.append(watch)
    return y


Actions = Mapping[str, Execute]

ACTIONS: Actions = {
    FORWARD: forward, RECOMPUTE: recompute, BACKWARD: backward, WEIGHT: weight_gradients,
}  # fmt: skip
"""One row per kind of action. A row of ``schedules.action.RULES`` says what it depends on."""
