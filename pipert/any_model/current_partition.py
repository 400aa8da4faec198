"""What is in effect while a micro-batch is in a partition, and how layers are called there.

A :class:`.MicroBatchForward` decides when a partition begins and ends, and which calls are calls of
layers; here is what is done then. A call of a layer

1. brings its arguments to the partition, as boundary tensors (``intercept``);
2. is noted: for random numbers, and since a norm must not be called in several partitions;
3. gets copies of the weights that live on another device (on GPUs);
4. is recorded as a segment, if ``R[i,j]`` is to repeat it (``checkpointed_calls``).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import gt
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import BatchNorm, NormBase, node_count, transforms
from pipert._typing import Value
from pipert.any_model.checkpointed_calls import checkpointed_call
from pipert.any_model.intercept import CHANGED, Intercept, Paused, TensorCopies
from pipert.any_model.microbatch_graph import MicroBatchGraph, memory_of
from pipert.any_model.model_layers import ModelLayer, ModelLayers
from pipert.any_model.shared_state import Inspection
from pipert.autograd.hooks import checkpoint_around
from pipert.autograd.order import begin_numbers
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import differentiable, map_tensors
from pipert.layers.batchnorm import PartitionStats
from pipert.layers.compiling import call_compiled
from pipert.layers.modules import modules_of
from pipert.layers.parameter_copies import ParameterCopies
from pipert.layers.random_numbers import TaskRng
from pipert.recompute.segment import Segments
from pipert.schedules.action import FORWARD, Action
from pipert.stage.run import Run
from pipert.stage.stage import Stage
from pipert.stage.step import Step
from pipert.workers.context import NOTHING


@dataclass(slots=True, eq=False)
class ModelRun:
    """One run of a model. Made by the caller."""

    run: Run
    module: nn.Module
    layers: ModelLayers
    step: Step | None
    stats: PartitionStats | None
    """The deferred statistics of the whole model, if any. One worker notes each layer's."""
    draws: bool = False
    """Whether any layer might draw random numbers; in which partition it will is unknown."""
    called_in: dict[nn.Module, int] = field(default_factory=dict)
    """The partition that each layer was first called in."""
    parameters: ParameterCopies | None = None
    """The copies of parameters and buffers on another device; ``None`` if all is on the CPU."""
    inspection: Inspection | None = None
    """Compares what micro-batches set on modules, in some of the runs."""
    microbatches: dict[int, Any] = field(default_factory=dict)
    """The ``MicroBatchForward`` of each micro-batch that has begun."""

    def __post_init__(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.parameters = ParameterCopies(self.layers.shared_buffers)
            self.parameters.note_versions(self.parameters.tensors_of(self.module))

    def refuse_shared_norms(self, layer: ModelLayer, j: int) -> None:
        """Refuse a layer that is called in partition ``j``, too, if it updates statistics there."""
        plan, first = self.run.plan, self.called_in[layer.module]
        if plan.m == 1 or plan.placement[first] == plan.placement[j]:
            return  # in a fixed order
        for module in modules_of(layer.module):
            if self.stats is not None and isinstance(module, BatchNorm):
                continue  # deferred
            if isinstance(module, NormBase) and module.training and module.track_running_stats:
                raise ValueError(
                    f"{layer.name} is called in partitions {first} and {j}, so its "
                    f"{type(module).__name__} would update its running statistics in no fixed "
                    "order; choose deferred_batch_norm=True, which defers those of "
                    "BatchNorm, or cuts with all calls of the layer in one partition"
                )


class CurrentPartition:
    """The partition that micro-batch ``i`` is in. Used on its thread."""

    def __init__(self, model_run: ModelRun, i: int) -> None:
        self._model_run = model_run
        self._i = i
        self._stage: Stage  # the current one, or the last
        self._graph = None if model_run.step is None else MicroBatchGraph(i, model_run.step)
        is_on_gpus = model_run.parameters is not None  # or an argument is
        self._copies = TensorCopies(i, model_run.run) if is_on_gpus else None
        self._intercept: Intercept | None = None
        if self._graph is not None or self._copies is not None:
            copy_of = self._copy_of if is_on_gpus else None
            self._intercept = Intercept(self._graph, self._copies, copy_of)
        self._segments: Segments | None = None  # the calls of the current partition
        self._parts: list[tuple[int, int, torch.device]] = []  # of a recording, those begun
        self._rng: TaskRng  # the random numbers of the partition
        self._block = ExitStack()  # what holds for the partition

    def run(self, stage: Stage, forward: Callable[[Value], Value], x: Value) -> Value:
        """Run ``forward`` on ``x``, beginning in ``stage``; return what the last stage sends."""
        shared, intercept = self._model_run, self._intercept
        notes = NOTHING if shared.stats is None else shared.stats.collecting()
        # Gradients that it asks for make nodes on this thread, with its numbers, on GPUs too.
        cuts = self._graph is not None and self._copies is not None
        numbers = torch.autograd.set_multithreading_enabled(False) if cuts else NOTHING
        with notes, numbers, self._block:
            # Lower numbers are of the caller's nodes, or turns of micro-batches (autograd.order).
            begin_numbers(max(shared.run.first_node, shared.run.plan.m))
            self.begin(stage)
            own = x if shared.run.plan.m == 1 else None
            x = x if intercept is None else intercept.enter_inputs(x)
            given = [] if x is own else _containers(x)
            sizes = list(map(len, given))
            with NOTHING if intercept is None else intercept:
                y = forward(x)
            if shared.step is None or shared.run.function is None:
                if any(map(gt, map(len, given), sizes)):
                    raise ValueError(_FILLED)
            elif self._i == shared.run.plan.m - 1 and not shared.called_in:
                raise RuntimeError(_NOT_CALLED)
            if intercept is not None:
                if shared.parameters is not None:
                    shared.parameters.refuse_functions(y)
                y = map_tensors(y, intercept.bring)
            last, segments = self._stage, None
            if last.step_boundary is not None and intercept is not None:
                segments = self._segments
                with intercept:
                    y = last.step_boundary.compute_loss(self._i, y)
            elif self._parts:
                shared.run.trace.watch_backward(self._i, differentiable(y)[0], self._parts)
            self.end()
            return last.boundary.leave(self._i, y, segments)

    def begin(self, stage: Stage) -> None:
        """Begin the partition of ``stage``, which has been handed off."""
        self._stage = stage
        shared, place = self._model_run, stage.place
        if place.device.type == "cuda":
            torch.cuda.set_device(stage.place.device)
        trace, action = shared.run.trace, Action(FORWARD, self._i, place.j)
        if trace.is_watched:
            self._block.enter_context(trace.task(action, place.device))
        if trace.is_recorded:
            self._parts.append((node_count(), place.j, place.device))
        self._rng = TaskRng(shared.run.seed, action, place.device)
        self._rng.called = set()
        self._block.enter_context(self._rng)  # the model's own code may draw, too
        self._segments = stage.layers.segments(self._i) if self._i < stage.recomputed else None
        if self._graph is not None and shared.step is not None:
            self._graph.begin(place.j)
            shared.step.ledger[self._i, place.j].segments = self._segments
        if self._copies is not None:
            self._copies.begin(stage)

    def end(self) -> None:
        """End the partition, which is about to be handed back."""
        inspection, place = self._model_run.inspection, self._stage.place
        if inspection is not None:
            inspection.end(self._i, place)
        if self._intercept is not None:
            with Paused(self._intercept):
                self._end_boundary(self._intercept)
        if self._graph is not None:
            self._graph.end()
        self._segments = None
        self._block.close()

    def _end_boundary(self, intercept: Intercept) -> None:
        boundary = intercept.boundary
        boundary.end(0 if self._graph is None else self._graph.first)
        if (copies := self._model_run.parameters) is not None:  # paused: no copies are taken
            is_lost, module = copies.are_changed(), self._model_run.module
            if boundary.changed and not is_lost:
                own = {*map(memory_of, (*module.parameters(), *module.buffers()))}
                is_lost = any(memory_of(x.original) in own for x in boundary.changed.values())
            if is_lost:
                raise RuntimeError(CHANGED)
        if self._copies is not None:
            self._copies.end(self._segments)

    def call(
        self, layer: ModelLayer | None, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a layer in the current partition, or one of ``ModelLayers.encoders``.

        A function mode would keep an encoder from torch's fast path, whose outputs are 0 at
        padding. So its own code is not inspected.
        """
        if self._intercept is None:
            return self._compute(layer, call, args, kwargs) if layer else call(*args, **kwargs)
        with Paused(self._intercept):
            args, kwargs = self._intercept.bring_all(args, kwargs)
            if layer is None:
                return call(*args, **kwargs)
            y = self._compute(layer, call, args, kwargs)
            if self._copies is not None:
                self._copies.settle(y)
        return y

    def _compute(self, layer: ModelLayer, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a layer whose arguments are here."""
        shared, stage = self._model_run, self._stage
        self._rng.note_call(layer.module)
        if shared.called_in.setdefault(layer.module, stage.place.j) != stage.place.j:
            shared.refuse_shared_norms(layer, stage.place.j)
        if layer.is_compiled:
            call = partial(call_compiled, call)
        if shared.parameters is not None:
            call = self._with_copies(shared.parameters, layer, call, (*args, *kwargs.values()))
        if not (
            self._segments is not None
            and torch.is_grad_enabled()
            # What works in place, in torch.utils.checkpoint or in a transform, keeps what it saves.
            and not layer.is_in_place
            and checkpoint_around() is None
            and not transforms()
            and stage.layers.recomputes(layer.module)
        ):
            return call(*args, **kwargs)
        compute = partial(stage.layers.call_layer, self._i, layer.module, layer.name, call)
        drawing = self._rng.replay_from_here() if shared.draws else None
        return checkpointed_call(self._segments, layer.name, compute, drawing, args, kwargs)

    def _with_copies(
        self, parameters: ParameterCopies, layer: ModelLayer, call: Callable[..., Any], given: Any
    ) -> Callable[..., Any]:
        """Return ``call``, made to use copies of what lives elsewhere, of modules given to it, too.

        What has never been called before is moved here instead.
        """
        shared, j = self._model_run, self._stage.place.j
        modules = [x for x in given if isinstance(x, nn.Module)]
        for used in (layer, *filter(None, map(shared.layers.get, modules))):
            shared.layers.move_on_first_call(used, self._stage)
            shared.called_in.setdefault(used.module, j)
        return parameters.wrap(j, [layer.module, *modules], call, self._copy_of)

    def _copy_of(self, weight: Tensor) -> Tensor:
        """Return the copy of a parameter or buffer in the current partition, or itself."""
        stage, copies = self._stage, self._model_run.parameters
        if copies is None or weight.device == stage.place.device:
            return weight
        return copies.copy_of(weight, stage.place.j, partial(stage.boundary.copy_weight, self._i))

    def clear(self) -> None:
        """Forget the micro-batch."""
        self._intercept = self._segments = None


def _containers(x: Value) -> list[Any]:
    """Return the lists and mappings among the arguments."""
    values = (*x.args, *x.kwargs.values()) if isinstance(x, Arguments) else (x,)
    return [value for value in values if isinstance(value, list | MutableMapping)]


_NOT_CALLED = "step called no layer of the model that is in the pipe; call pipe.module, no copy"
_FILLED = (
    "forward adds to a list or a mapping among its arguments, of which each micro-batch has a "
    "copy, so the caller's would stay as it is; return what is added, or use chunks=1 with inputs "
    "on the first device"
)
