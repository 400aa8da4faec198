"""pipert: train one model over several devices in your own process.

>>> from pipert import Pipe
>>> pipe = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)  # doctest: +SKIP
"""

from __future__ import annotations

from pipert.batch.microbatch import Replicate
from pipert.errors import (
    NestedCheckpointError,
    NotBatchFirstWarning,
    PipeClosedError,
    PipelineTimeout,
    PipertError,
    RecomputationError,
    ReentrantCallError,
    SharedStateWarning,
    TransformError,
    WholeBatchWarning,
    WorkerBusyError,
    WorkerDiedError,
)
from pipert.model.parameters import empty_parameters
from pipert.observe.event import Event, Observer, RunInfo
from pipert.observe.timeline import Timeline
from pipert.pipe import Pipe
from pipert.pipeline import pipeline
from pipert.pipes.module_pipe import ModulePipe
from pipert.planning.search import plan_for
from pipert.recompute.public import (
    current_microbatch,
    is_checkpointing,
    is_recomputing,
    never_recompute,
)
from pipert.status import Statistics, TaskInfo, WorkerStatistics

__version__ = "0.1.0"

__all__ = [
    "Event",
    "ModulePipe",
    "NestedCheckpointError",
    "NotBatchFirstWarning",
    "Observer",
    "Pipe",
    "PipeClosedError",
    "PipelineTimeout",
    "PipertError",
    "RecomputationError",
    "Replicate",
    "ReentrantCallError",
    "RunInfo",
    "SharedStateWarning",
    "Statistics",
    "TaskInfo",
    "Timeline",
    "TransformError",
    "WholeBatchWarning",
    "WorkerBusyError",
    "WorkerDiedError",
    "WorkerStatistics",
    "__version__",
    "current_microbatch",
    "empty_parameters",
    "is_checkpointing",
    "is_recomputing",
    "never_recompute",
    "pipeline",
    "plan_for",
]
