"""The way of a micro-batch through one stage, from top to bottom.

A worker takes each action as a ``stage.Task``: it receives the input from a link, calls the
function below, and sends the result over a link::

    F[i,j]   x from stage j-1    forward      y to stage j+1
    R[i,j]                       recompute
    B[i,j]   dy from stage j+1   backward     dx to stage j-1

``R`` and ``B`` are actions of a step. In a call, ``R`` is a node of the graph, and ``B`` autograd's
own walk along it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipert._typing import Value
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE
from pipert.stage.backward import Gradients, differentiate_stage, gather, scatter
from pipert.stage.forward import compute
from pipert.stage.stage import Execute, Stage

__all__: list[str] = []


def forward(stage: Stage, i: int, x: Value) -> Value:
    """Carry out ``F[i,j]``: turn the input of the stage into its output."""
    if stage.borrowed:
        stage.borrow(i)  # parameters that live on other devices
    x = stage.with_arriving_skips(i, x)
    x = stage.ends.enter(i, x)  # copied here; in a call tied to F[i-1,j], in a step cut off
    y = compute(stage, i, x)  # the layers, checkpointed or not, and the loss
    y = stage.ends.leave(i, y)  # in a call with a node for R[i,j]; in a step cut off
    return stage.without_leaving_skips(i, y)


def recompute(stage: Stage, i: int, _: Value) -> None:
    """Carry out ``R[i,j]`` of a step: build the graph that a checkpointed ``F[i,j]`` has not."""
    cut = stage.cut
    assert cut is not None
    kept = cut.kept.get(i)
    if kept is not None and kept.recomputation is not None:
        graph = kept.recomputation.compute(True)
        cut.kept[i] = kept._replace(graphs=(*kept.graphs, graph), recomputation=None)


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


Actions = Mapping[str, Execute]

ACTIONS: Actions = {FORWARD: forward, RECOMPUTE: recompute, BACKWARD: backward}
"""One row per kind of action. A row of ``schedules.action.RULES`` says what it depends on."""
