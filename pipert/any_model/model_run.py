"""What the micro-batches of one run of a model with its own ``forward`` share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from pipert._torch import node_count
from pipert.any_model.checkpointed_calls import CheckpointedCalls
from pipert.any_model.microbatch_graph import MicroBatchGraph
from pipert.any_model.model_layers import ModelLayers
from pipert.any_model.parameter_copies import ParameterCopies
from pipert.any_model.shared_state import Inspection
from pipert.layers.batchnorm import PartitionStats
from pipert.stage.run import Run
from pipert.stage.step import Step

__all__: list[str] = []


@dataclass(slots=True, eq=False)
class ModelRun:
    """One run of a model. Made by the caller."""

    run: Run
    module: nn.Module
    layers: ModelLayers
    step: Step | None
    stats: PartitionStats | None
    """The deferred statistics of the whole model, if any. One worker notes each layer's."""
    inspection: Inspection | None
    """Compares what micro-batches set on modules, in some of the runs."""
    draws: bool = False
    """Whether any layer might draw random numbers; in which partition it will is unknown."""
    graphs: dict[int, MicroBatchGraph] = field(default_factory=dict)
    """The graph of each micro-batch in a step."""
    checkpointed: dict[tuple[int, int], CheckpointedCalls] = field(default_factory=dict)
    """By micro-batch and partition, those of a step, until they are recomputed."""
    copies_tensors: bool = field(init=False)
    """Whether tensors may have to be copied to a device, at least the arguments."""
    parameters: ParameterCopies = field(init=False)
    first_node: int = field(init=False)
    """Nodes with lower numbers are the caller's, or turns of micro-batches (``autograd.order``)."""

    def __post_init__(self) -> None:
        self.copies_tensors = {device.type for device in self.run.devices} != {"cpu"}
        is_step = self.step is not None
        self.parameters = ParameterCopies(self.module, is_step, self.copies_tensors)
        self.first_node = max(node_count(), self.run.plan.m)

    def clear(self) -> None:
        """Forget all micro-batches."""
        self.inspection = None
        self.graphs.clear()
        self.checkpointed.clear()
