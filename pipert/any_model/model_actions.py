"""The actions of a model with its own ``forward``.

``F[i,j]`` hands off its partition to a micro-batch thread, ``R[i,j]`` repeats calls of layers.

In a step ``B[i,j]`` differentiates the graph of one partition, from the loss and the gradients that
later partitions have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pipert._typing import Value
from pipert.any_model.inner_gradients import refuse_through
from pipert.any_model.intercept import Intercept, PartitionGraph
from pipert.any_model.model_run import ModelRun
from pipert.autograd import order
from pipert.autograd.leaves import leaves_behind
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, Action
from pipert.stage.actions import Actions
from pipert.stage.backward import alone, gradients_of, refuse_hooked
from pipert.stage.stage import Stage
from pipert.stage.step_boundary import StepBoundary
from pipert.workers.context import NOTHING

__all__: list[str] = []


def actions(model_run: ModelRun) -> Actions:
    """Return the functions that carry out each kind of action of the stages of ``model_run``."""
    return {
        FORWARD: model_run.hand_off,
        RECOMPUTE: partial(_recompute, model_run),
        BACKWARD: partial(_backward, model_run),
    }


def _recompute(model_run: ModelRun, stage: Stage, i: int, _: Value) -> None:
    calls = model_run.checkpointed.pop((i, stage.place.j), None)
    if calls is not None:
        calls.recompute(True)


def _backward(model_run: ModelRun, stage: Stage, i: int, _: Value) -> Value:
    intercept, cut, j = model_run.intercepts.get(i), stage.cut, stage.place.j
    assert cut is not None
    part = intercept.parts.pop(j, None) if intercept is not None else None
    if part is None:
        return ()
    notifier, action = stage.run.notifier, Action(BACKWARD, i, j)
    recorded = notifier.recorder is not None
    with notifier.recorded(action, stage.place.device) if recorded else NOTHING:
        stage.layers.backward(i, _differentiate, stage, cut, i, intercept, part)
    return ()


def _differentiate(
    stage: Stage, cut: StepBoundary, i: int, intercept: Intercept, part: PartitionGraph
) -> None:
    """Go back from what later partitions have used to what has entered, and to the weights."""
    j = stage.place.j
    ys: list[Any] = []
    dys = []
    if part.loss is not None and part.loss.requires_grad:
        ys.append(order.edge_of(part.loss))
        dys.append(cut.step.loss.gradient_of(i, part.loss))
    for source in part.sources.values():
        if source.hooks is not None:
            source.hooks.tie()
        gradient = _sum(cut, i, source.gradients)
        if gradient is not None:
            ys.append(source.edge)
            dys.append(gradient)
    xs: list[Any] = [edge for edge, _ in part.entries]
    found: Sequence[Tensor | None] = (None,) * len(xs)
    leaves: list[Tensor] = []
    if ys:
        ours = range(part.first, part.last)
        ends = [y.node for y in ys]
        behind = leaves_behind(ends, [order.ENTRANCE], ours)
        unseen = intercept.enter_unseen(part, behind.others, behind.nodes)
        if unseen:
            xs += unseen
            behind = leaves_behind(ends, [order.ENTRANCE], ours, [edge.node for edge in unseen])
            refuse_through(unseen, behind.leaves)
        leaves = behind.leaves
        refuse_hooked(cut, leaves)
        found = gradients_of(stage, (*xs, *leaves), ys, dys, behind)
    inputs = []
    for (_, source), dx in zip(part.entries, found, strict=False):
        if source.edge is None:
            inputs.append(None if dx is None else alone(dx))
        elif dx is not None:
            source.gradients.append((alone(dx), j))
    if j == 0:
        cut.step.input_gradients[i] = inputs
    cut.copies.let_others_copy(i)
    cut.gradients.add(leaves, found[len(xs) :])


def _sum(cut: StepBoundary, i: int, gradients: list[tuple[Tensor, int]]) -> Tensor | None:
    """Add up the gradients that partitions have sent, each with the partition it comes from."""
    total = None
    for gradient, origin in gradients:
        (moved,) = cut.bring_gradients(i, [gradient], origin)
        total = moved if total is None else total + moved  # type: ignore[operator]
    return total
