"""The actions of a model with its own ``forward``.

``F[i,j]`` hands off its partition to a micro-batch thread, ``R[i,j]`` repeats calls of layers.

In a step ``B[i,j]`` differentiates the graph of one partition, from the loss and the gradients that
later partitions have sent.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from pipert._typing import Value
from pipert.any_model.around_layers import ModelRun
from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.any_model.microbatch_graph import MicroBatchGraph, PartitionGraph
from pipert.any_model.microbatch_thread import MicroBatchThreads
from pipert.autograd import order
from pipert.autograd.leaves import Behind, leaves_behind
from pipert.autograd.segment import Graph
from pipert.errors import SharedStateWarning, add_note
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.stage.actions import Actions, weight_gradients
from pipert.stage.backward import differentiate_graph, differentiate_recomputed
from pipert.stage.stage import Stage
from pipert.stage.step_boundary import StepBoundary
from pipert.workers.context import NOTHING


class ModelActions:
    """Carries out the actions of one run."""

    def __init__(self, model_run: ModelRun, threads: MicroBatchThreads) -> None:
        self._model_run = model_run
        self._threads = threads
        self._microbatches: dict[int, MicroBatchForward] = {}

    def table(self) -> Actions:
        """Return the function that carries out each kind of action."""
        own = {FORWARD: self.forward, RECOMPUTE: self.recompute, BACKWARD: self.backward}
        return {**own, WEIGHT: weight_gradients}

    def forward(self, stage: Stage, i: int, x: Value) -> Value:
        """Carry out ``F[i,j]``: hand off to micro-batch ``i``, which partition 0 starts."""
        if stage.place.j == 0:
            microbatch = MicroBatchForward(self._model_run, i, x, self._threads.release)
            self._microbatches[i] = microbatch
            self._threads.start(microbatch)
        microbatch = self._microbatches[i]
        worker: Any = threading.current_thread()
        worker.executed_by = microbatch.thread
        try:
            return microbatch.hand_off(stage)
        finally:
            worker.executed_by = None

    def recompute(self, stage: Stage, i: int, _: Value) -> None:
        """Carry out ``R[i,j]`` of a step: compute the checkpointed calls again."""
        segments = self._model_run.segments.get((i, stage.place.j))
        if segments is not None:
            segments.recompute(True)

    def backward(self, stage: Stage, i: int, _: Value) -> Value:
        """Carry out ``B[i,j]`` of a step: go back from what later partitions have used."""
        graph, cut, j = self._model_run.graphs.get(i), stage.cut, stage.place.j
        segments = self._model_run.segments.pop((i, j), None)
        part = graph.partitions.pop(j, None) if graph is not None else None
        if graph is None or part is None or cut is None:
            return ()
        if segments is not None:
            segments.in_step = partial(differentiate_recomputed, cut, i)
        notifier, action = stage.run.notifier, Action(BACKWARD, i, j)
        recorded = notifier.recorder is not None
        with notifier.recorded(action, stage.place.device) if recorded else NOTHING:
            stage.layers.backward(i, self._differentiate, stage, cut, i, part, graph)
        return ()

    def _differentiate(
        self,
        stage: Stage,
        cut: StepBoundary,
        i: int,
        part: PartitionGraph,
        graph: MicroBatchGraph,
    ) -> None:
        """Go back to what has entered the partition, and to the weights."""
        j = stage.place.j
        ys: list[Any] = []
        dys: list[Tensor | None] = []
        if part.loss is not None and part.loss.requires_grad:
            ys.append(order.edge_of(part.loss))
            dys.append(cut.step.loss.gradient_of(i, part.loss))
        for source in part.sources.values():
            ys.append(source.edge)
            dys.append(_sum(cut, i, source.gradients))
        xs = tuple([edge for edge, _ in part.entries])
        look = partial(_look_behind, part, graph)
        own = Graph(xs, tuple(ys))
        dxs, leaves, gradients = differentiate_graph(stage, cut, i, own, dys, look)
        inputs = []
        for (_, source), dx in zip(part.entries, dxs, strict=True):
            if source.edge is None:
                inputs.append(dx)
            elif dx is not None:
                source.gradients.append((dx, j))
        if j == 0:
            cut.step.input_gradients[i] = inputs
        cut.copies.let_others_copy(i)
        cut.gradients.add(leaves, gradients)

    def finish(self) -> None:
        """End each ``forward`` and wait for them, however the run ended (H3). In the caller."""
        microbatches = list(self._microbatches.values())
        for microbatch in microbatches:
            microbatch.unwind()
        if not self._model_run.run.dropped:
            for microbatch in microbatches:
                microbatch.wait()
        if (inspection := self._model_run.inspection) is not None:
            error = self._model_run.run.outcome.first_error()
            if error is not None and not isinstance(error, SharedStateWarning):
                add_note(error, inspection.note)
        self._microbatches.clear()
        self._model_run.clear()


def _look_behind(part: PartitionGraph, graph: MicroBatchGraph, ends: list[Node]) -> Behind:
    """Return what is behind the ends of a partition; refuse what has entered it unseen."""
    behind = leaves_behind(ends, [order.ENTRANCE], range(part.first, part.last))
    graph.refuse_unseen(part, behind)
    return behind


def _sum(cut: StepBoundary, i: int, gradients: list[tuple[Tensor, int]]) -> Tensor | None:
    """Add up the gradients that partitions have sent, each with the partition it comes from."""
    total = None
    for gradient, origin in gradients:
        (moved,) = cut.bring_gradients(i, [gradient], origin)
        total = moved if total is None else total + moved  # type: ignore[operator]
    gradients.clear()  # else they would stay until the step ends
    return total
