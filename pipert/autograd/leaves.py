"""Leaves that another thread may be using for the first time.

torch (2.13) makes the ``AccumulateGrad`` of a leaf when an operation first uses it: it holds the
leaf's lock, and takes the interpreter's meanwhile. A ``Function`` in Python is applied the other
way round, it has the interpreter's lock and waits for the leaf's. Both at once wait for each other
for ever, without a pipe as well. What has been made is only looked up. So before a function of ours
is applied to a leaf, an operation of torch's own makes it, which waits without the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__: list[str] = []


def accumulators(tensors: Iterable[Tensor]) -> list[GradientEdge]:
    """Those of the leaves among ``tensors``: to be held while a function is applied to them."""
    return [
        get_gradient_edge(x)
        for x in tensors
        if x.is_leaf and x.requires_grad and x.layout == torch.strided
    ]
