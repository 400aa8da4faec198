"""The way of a micro-batch through one stage, from top to bottom.

A worker takes each action as a ``stage.Task``: it receives the input from a link, calls the
function below, and sends the result over a link::

    F[i,j]   x from stage j-1             forward      y to stage j+1
    R[i,j]                                recompute
    B[i,j]   that B[i,j+1] is done        backward     that B[i,j] is done
    W[i,j]                                weight_gradients

Gradients wait in the ledger of the step for the partition that made the tensor.

``R``, ``B`` and, under some schedules, ``W`` are actions of a step. In a call, ``R`` is a node of
the graph, and ``B`` autograd's own walk along it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from pipert._typing import Value
from pipert.autograd.hooks import hiding_partial_gradients
from pipert.autograd.order import begin_numbers
from pipert.autograd.weight_gradients import compute_deferred
from pipert.batch.tensors import differentiable
from pipert.layers.random_numbers import TaskRng
from pipert.recompute.segment import Segments
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.skip.store import Carried
from pipert.stage.backward import begin, differentiate_partition
from pipert.stage.shared_memory import compute_watching
from pipert.stage.stage import Execute, Stage
from pipert.workers.context import NOTHING


def forward(stage: Stage, i: int, x: Value) -> Value:
    """Carry out ``F[i,j]``: turn the input of the stage into its output."""
    if stage.weights_elsewhere:
        stage.copy_weights(i)  # parameters that live on other devices
    # Copied here; in a call tied to F[i-1,j], in a step cut off.
    is_plain, boundary = not stage.skips and isinstance(x, Tensor), stage.boundary
    x = boundary.cross(i, x, boundary.copies.previous) if is_plain else stage.enter(i, x)
    segments = stage.layers.segments(i, stage.run.first_node) if i < stage.recomputed else None
    y = (compute_seen if stage.run.trace.is_watched else compute)(stage, i, segments, x)
    y = boundary.leave(i, y, segments)  # in a call with a node for R[i,j]
    return stage.send_skips(i, y) if isinstance(y, Carried) else y


def compute(stage: Any, i: int, segments: Segments | None, x: Value) -> Value:
    """Compute the layers, checkpointed or not, and in the last stage of a step the loss.

    Of ``stage`` only ``layers``, ``stats``, ``shared`` and ``loss`` are used: those of a rank
    (``distributed``) have no links.
    """
    with NOTHING if stage.stats is None else stage.stats.collecting():
        watch = partial(compute_watching, stage.shared) if any(stage.shared) else None
        y = stage.layers.forward(i, segments, x, watch)
    if stage.loss is None:
        return y
    return stage.loss(i, y.value if isinstance(y, Carried) else y)


def recompute(stage: Stage, i: int, _: Value) -> None:
    """Carry out ``R[i,j]`` of a step: build the graph that a checkpointed ``F[i,j]`` has not."""
    cut = stage.step_boundary
    assert cut is not None
    graph = cut.step.ledger.get((i, stage.place.j))
    if graph is not None and graph.segments is not None:
        graph.segments.recompute(True)


def backward(stage: Stage, i: int, _: Value) -> Value:
    """Carry out ``B[i,j]`` of a step: go back from the loss and from what later partitions used."""
    cut, trace, action = stage.step_boundary, stage.run.trace, Action(BACKWARD, i, stage.place.j)
    assert cut is not None
    graph = cut.step.ledger.pop((i, action.j), None)
    ys, dys = ([], []) if graph is None else begin(cut, i, graph)
    with trace.task(action, stage.place.device) if trace.is_watched else NOTHING:
        if graph is not None:
            with _turn_of_backward(stage, action):
                differentiate_partition(stage, cut, i, graph, ys, dys)
    return ()


def weight_gradients(stage: Stage, i: int, _: Value) -> None:
    """Carry out ``W[i,j]`` of a step: compute the gradients of weights that ``B[i,j]`` put off."""
    cut, trace, action = stage.step_boundary, stage.run.trace, Action(WEIGHT, i, stage.place.j)
    assert cut is not None
    later = cut.deferred.pop(i, [])
    leaves = [leaf for use in later for leaf in use.leaves]
    with trace.task(action, stage.place.device) if trace.is_watched else NOTHING:
        with _turn_of_backward(stage, action):
            found = hiding_partial_gradients(leaves, compute_deferred, later)
        cut.gradients.add(*found)


def _turn_of_backward(stage: Stage, action: Action) -> AbstractContextManager[object]:
    """Return the block in which a backward has the CPU's generator, if forwards drew from it."""
    seed, place = stage.run.seed, stage.place
    if seed.number is None or not seed.turns.drawing:  # a run beside this may draw alone
        return NOTHING
    return TaskRng(seed, action, place.device)


def compute_seen(stage: Stage, i: int, segments: Segments | None, x: Value) -> Value:
    """Compute the layers in a run that is watched; in a call, let ``B[i,j]`` be recorded, too."""
    trace, place, first = stage.run.trace, stage.place, begin_numbers(stage.run.first_node)
    xs = [tensor.grad_fn for tensor in differentiable(x)[0] if tensor.grad_fn is not None]
    with trace.task(Action(FORWARD, i, place.j), place.device):
        y = compute(stage, i, segments, x)
    if trace.is_recorded and stage.step_boundary is None:
        trace.watch_backward(i, differentiable(y)[0], [(first, place.j, place.device)], xs)
    return y


ACTIONS: dict[str, Execute] = {
    FORWARD: forward, RECOMPUTE: recompute, BACKWARD: backward, WEIGHT: weight_gradients,
}  # fmt: skip
"""One row per kind of action. A row of ``schedules.action.RULES`` says what it depends on."""
