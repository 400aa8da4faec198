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

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from pipert._torch import node_count
from pipert._typing import Value
from pipert.autograd.hooks import hiding_partial_gradients
from pipert.autograd.weight_gradients import compute_deferred
from pipert.batch.tensors import differentiable
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.call import Compute
from pipert.layers.random_numbers import TaskRng
from pipert.observe.backward import makers, watch_nodes
from pipert.recompute.segment import Segments
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.stage.backward import begin, differentiate_partition
from pipert.stage.shared_memory import Shared, compute_watching
from pipert.stage.stage import Execute, Stage
from pipert.workers.context import NOTHING


def forward(stage: Stage, i: int, x: Value) -> Value:
    """Carry out ``F[i,j]``: turn the input of the stage into its output."""
    if stage.weights_elsewhere:
        stage.copy_weights(i)  # parameters that live on other devices
    # Copied here; in a call tied to F[i-1,j], in a step cut off.
    is_plain, boundary = stage.skips is None and isinstance(x, Tensor), stage.boundary
    x = boundary.cross(i, x, boundary.copies.previous) if is_plain else stage.enter(i, x)
    segments = stage.segments(i) if i < stage.recomputed else None
    is_recorded = stage.run.notifier.recorder is not None
    y = (compute_recorded if is_recorded else compute)(stage, i, segments, x)
    y = boundary.leave(i, y, segments)  # in a call with a node for R[i,j]
    return y if stage.skips is None else stage.without_leaving_skips(i, y)


class Computed(Protocol):
    """What :func:`compute` needs of a stage; one of a rank (``distributed``) has no links."""

    layers: Any
    """Has ``forward``, as :class:`.Layers`."""
    stats: PartitionStats | None
    shared: Shared

    @property
    def loss(self) -> Callable[[int, Value], Value] | None:
        """Computes the loss, in the last stage of a step."""


def compute(stage: Computed, i: int, segments: Segments | None, x: Value) -> Value:
    """Compute the layers, checkpointed or not, and in the last stage of a step the loss."""
    with NOTHING if stage.stats is None else stage.stats.collecting():
        watch = partial(_watched, stage) if stage.shared else None
        y = stage.layers.forward(i, segments, x, watch)
    return y if stage.loss is None else stage.loss(i, y)


def recompute(stage: Stage, i: int, _: Value) -> None:
    """Carry out ``R[i,j]`` of a step: build the graph that a checkpointed ``F[i,j]`` has not."""
    cut = stage.step_boundary
    assert cut is not None
    graph = cut.step.ledger.graphs.get((i, stage.place.j))
    if graph is not None and graph.segments is not None:
        graph.segments.recompute(True)


def backward(stage: Stage, i: int, _: Value) -> Value:
    """Carry out ``B[i,j]`` of a step: go back from the loss and from what later partitions used."""
    cut, notifier, j = stage.step_boundary, stage.run.notifier, stage.place.j
    assert cut is not None
    graph = cut.step.ledger.graphs.pop((i, j), None)
    if graph is not None:
        ys, dys = begin(cut, i, graph)
        action, is_recorded = Action(BACKWARD, i, j), notifier.recorder is not None
        with notifier.recorded(action, stage.place.device) if is_recorded else NOTHING:
            with _turn_of_backward(stage, action):
                differentiate_partition(stage, cut, i, graph, ys, dys)
    return ()


def weight_gradients(stage: Stage, i: int, _: Value) -> None:
    """Carry out ``W[i,j]`` of a step: compute the gradients of weights that ``B[i,j]`` put off."""
    cut, notifier = stage.step_boundary, stage.run.notifier
    assert cut is not None
    later = cut.deferred.pop(i, [])
    leaves = [leaf for use in later for leaf in use.leaves]
    action, is_recorded = Action(WEIGHT, i, stage.place.j), notifier.recorder is not None
    with notifier.recorded(action, stage.place.device) if is_recorded else NOTHING:
        with _turn_of_backward(stage, action):
            found = hiding_partial_gradients(leaves, compute_deferred, later)
        cut.gradients.add(*found)


def _turn_of_backward(stage: Stage, action: Action) -> AbstractContextManager[object]:
    """Return the block in which a backward has the CPU's generator, if forwards drew from it."""
    seed, place = stage.run.seed, stage.place
    if seed.number is None or not seed.turns.drawing:  # a run beside this may draw alone
        return NOTHING
    return TaskRng(seed, action, place.device)


def _watched(stage: Computed, compute: Compute, x: Value) -> Value:
    """Compute layers; refuse changes of tensors in ``x``, the first value, that share memory."""
    shared, stage.shared = stage.shared, {}
    return compute_watching(shared, compute, x)


def compute_recorded(stage: Stage, i: int, segments: Segments | None, x: Value) -> Value:
    """Compute the layers, and record that.

    In a call the nodes of ``B[i,j]`` are watched as well, since it is no task. The walk that finds
    them comes after the output has been sent, so that no stage waits for it.
    """
    notifier, recorder = stage.run.notifier, stage.run.notifier.recorder
    assert recorder is not None
    j, device = stage.place.j, stage.place.device
    inputs, first = makers(differentiable(x)[0]), node_count()
    with notifier.recorded(Action(FORWARD, i, j), device):
        y = compute(stage, i, segments, x)
    if stage.step_boundary is None and stage.run.context.grad_enabled:
        outputs, made = makers(differentiable(y)[0]) - inputs, range(first, node_count())
        watch = partial(watch_nodes, recorder, i, j, device, outputs, inputs, made)
        stage.after_sending.append(watch)
    return y


Actions = Mapping[str, Execute]

ACTIONS: Actions = {
    FORWARD: forward, RECOMPUTE: recompute, BACKWARD: backward, WEIGHT: weight_gradients,
}  # fmt: skip
"""One row per kind of action. A row of ``schedules.action.RULES`` says what it depends on."""
