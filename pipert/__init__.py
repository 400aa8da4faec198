"""pipert: train one ``nn.Sequential`` over several devices in your own process.

>>> from pipert import Pipe
>>> pipe = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)  # doctest: +SKIP
"""

from __future__ import annotations

from pipert.computation import is_checkpointing, is_recomputing
from pipert.errors import (
    NestedCheckpointError,
    PipeClosedError,
    PipertError,
    RecomputationError,
    ReentrantCallError,
    TransformError,
    WorkerDiedError,
)
from pipert.microbatch import Replicate
from pipert.pipe import Pipe

__version__ = "0.1.0"

__all__ = [
    "NestedCheckpointError",
    "Pipe",
    "PipeClosedError",
    "PipertError",
    "RecomputationError",
    "Replicate",
    "ReentrantCallError",
    "TransformError",
    "WorkerDiedError",
    "__version__",
    "is_checkpointing",
    "is_recomputing",
]
