"""Autograd's engine: the one door to it for the backward of a task.

``torch.autograd.grad`` looks at shapes, dtypes and overrides of its arguments, in Python, before it
calls the engine. Gradients that come out of the engine, for outputs of a task, need none of that,
and for layers that compute next to nothing it takes as long as the engine itself. The engine
converts dtypes on its own, sums gradients to the shapes of the outputs, and refuses what cannot be
summed. Where function modes are on, or a leaf is of a class that overrides functions, both are
asked as usual: a backward does not see the modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.overrides import has_torch_function

__all__: list[str] = []

_run: Any = graph._engine_run_backward  # private, as old as what it does for torch.autograd.grad


def differentiate(
    ys: Sequence[Any],
    wanted: Sequence[Any],
    dys: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of what is wanted, ``None`` for what was not used.

    Args:
        ys: tensors or gradient edges, from which it goes backward.
        wanted: leaves or gradient edges. With none nothing is done, which is no error: all that
            were used may have been frozen since.
        dys: the gradients of ``ys``.
        retain_graph: whether the graph is used again.
        create_graph: whether the gradients have a graph; it is used again then.
    """
    if not wanted:
        return ()
    retain_graph = retain_graph or create_graph
    if has_torch_function((*ys, *wanted)):
        return torch.autograd.grad(ys, wanted, dys, retain_graph, create_graph, allow_unused=True)
    found: tuple[Tensor | None, ...] = _run(
        tuple(ys),
        tuple(dys),
        retain_graph,
        create_graph,
        tuple(wanted),
        True,  # what was not used gets None
        accumulate_grad=False,
    )
    return found
