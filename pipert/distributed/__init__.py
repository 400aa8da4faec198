"""``pipert.distributed``: runs one model over several processes and machines.

Import it explicitly: ``import pipert`` does not.
"""

from __future__ import annotations

from pipert.distributed.placeholders import ReplayError
from pipert.distributed.rank_messages import RankError
from pipert.distributed.rank_pipe import Pipe
from pipert.distributed.rank_pipeline import ModulePipe, pipeline

__all__ = ["ModulePipe", "Pipe", "RankError", "ReplayError", "pipeline"]
