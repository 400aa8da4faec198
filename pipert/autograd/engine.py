"""Runs autograd's engine for the backward of a task. All backward passes of tasks go through here.

``torch.autograd.grad`` checks the shapes, dtypes and overrides of its arguments, in Python, before
it calls the engine. Gradients of a task's outputs, which come out of the engine, need no checks,
and for layers that compute next to nothing the checks take as long as the engine itself. The engine
converts dtypes on its own, sums gradients to the shapes of the outputs, and refuses what it cannot
sum. Where function modes are on, or a leaf's class overrides torch functions,
``torch.autograd.grad`` is called, so that they see it: a backward does not see the modes.

**V3** one backward has one thread: what pipert adds to the graph of a task is on the device of the
task, leaves included. The engine has a thread for each GPU, and the caller's is that of the CPU;
a node of a slice assignment changes the table of the backward, which the others read without a
lock. Tensors of several devices in a layer, and a call's ``loss.backward()``, are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from pipert._torch import run_backward


def differentiate(
    ys: Sequence[Any],
    wanted: Sequence[Any],
    dys: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``wanted``, with ``None`` for those that were not used.

    Args:
        ys: tensors or gradient edges at which the backward starts.
        wanted: leaves or gradient edges. If empty, nothing is done, which is no error: all that
            were used may have been frozen since.
        dys: the gradients of ``ys``.
        retain_graph: whether the graph will be used again.
    """
    if not wanted:
        return ()
    if has_torch_function((*ys, *wanted)):
        return torch.autograd.grad(ys, wanted, dys, retain_graph, False, allow_unused=True)
    found: tuple[Tensor | None, ...] = run_backward(
        tuple(ys),
        tuple(dys),
        retain_graph,
        False,  # no graph of the gradients
        tuple(wanted),
        True,  # unused ones get None
        accumulate_grad=False,
    )
    return found


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the ``apply`` that ``function`` inherits from the C++ base class.

    ``Function.apply`` first searches its arguments, in Python, for wrappers of ``torch.func``. A
    pipe refuses to run inside a transform, so pipert's functions never get any.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
