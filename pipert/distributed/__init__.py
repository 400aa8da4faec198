"""``pipert.distributed``: the same model over several processes and machines.

Import it yourself: ``import pipert`` does not.
"""

from __future__ import annotations

from pipert.distributed.agreement import RankError
from pipert.distributed.pipe import Pipe

__all__ = ["Pipe", "RankError"]
