"""``pipert.distributed``: runs one model over several processes and machines.

Import it explicitly: ``import pipert`` does not.
"""

from __future__ import annotations

from pipert.distributed.pipe import Pipe
from pipert.distributed.rank_agreement import RankError

__all__ = ["Pipe", "RankError"]
