"""Avoids a deadlock in torch over a leaf that another thread uses for the first time.

torch (2.13) creates the ``AccumulateGrad`` of a leaf when an operation first uses the leaf: it
holds the leaf's lock and then takes the interpreter's. Applying a ``Function`` written in Python
holds the interpreter's lock and then takes the leaf's. Both at once deadlock, even without a pipe.
An existing ``AccumulateGrad`` is only looked up. So before a function of ours is applied to a leaf,
an operation of torch's own creates it, which waits without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__: list[str] = []


def accumulators(tensors: Iterable[Tensor]) -> list[GradientEdge]:
    """Returns the leaves' accumulators, to hold while a function is applied to ``tensors``."""
    return [
        get_gradient_edge(x)
        for x in tensors
        if x.is_leaf and x.requires_grad and x.layout == torch.strided
    ]
