"""The autograd pieces of the lane. Nothing here knows threads, workers or partitions.

``order`` orders tasks, ``transfer`` moves tensors between devices, ``checkpoint`` trades memory for
recomputation, ``random_state`` makes random numbers independent of thread timing, ``drawing`` knows
who draws them, ``running_stats`` keeps recomputations from updating BatchNorm's statistics.
"""

from __future__ import annotations

__all__: list[str] = []
