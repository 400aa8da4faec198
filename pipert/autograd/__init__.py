"""The autograd nodes of an action. Nothing here knows threads, workers or partitions.

``order`` orders tasks, ``transfer`` moves tensors between devices on the ``streams`` for copies,
``checkpoint`` trades memory for recomputation, ``leaves`` keeps functions from deadlocking on a
leaf.
"""

from __future__ import annotations

__all__: list[str] = []
