"""Keeps functions from deadlocking on a leaf that another thread starts to use.

torch (2.13) looks up the ``AccumulateGrad`` of a leaf, or makes it, while it holds the leaf's lock,
and may take the interpreter's lock meanwhile: to make it, or if Python alone holds it. A
``Function`` in Python is applied in the opposite order: it has the interpreter's lock and waits for
the leaf's. Two threads that do both deadlock, without a pipe as well. So before a function of ours
is applied to a leaf, a view of the leaf makes the ``AccumulateGrad``, which waits without the
interpreter's lock, and holds it in C++ until the function was applied: a lookup is all that others
do then. No Python object of the node is made, which would be enough for a lookup to need the
interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__: list[str] = []


def accumulators(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns what holds those of the leaves: keep it while a function is applied to them."""
    leaves = [x for x in tensors if x.is_leaf and x.requires_grad and x.layout == torch.strided]
    if not leaves:
        return []
    with torch.enable_grad():
        return [leaf.view_as(leaf) for leaf in leaves]
