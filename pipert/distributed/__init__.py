"""``pipert.distributed``: runs one model over several processes and machines.

Import it explicitly: ``import pipert`` does not.
"""

from __future__ import annotations

from pipert.distributed.rank_agreement import RankError
from pipert.distributed.rank_pipe import Pipe

__all__ = ["Pipe", "RankError"]
