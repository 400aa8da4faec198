"""Plans a pipe before there is one: which balance, chunks, checkpoint and schedule fit the memory.

``search`` measures each layer and tries them; ``memory`` predicts the peak of each device.
"""

from __future__ import annotations

from pipert.planning.candidate import Candidate, Candidates
from pipert.planning.search import plan_for

__all__ = ["Candidate", "Candidates", "plan_for"]
