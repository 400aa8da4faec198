"""Refuses ``torch.cond`` and its like, with gradients, in tasks that run at the same time.

torch makes graphs of the functions that they get, in each forward and again in its backward. A
thread that does so replaces ``nn.Module.__call__`` and flags of the whole process. Two at once
raise errors from inside torch, and leave the flags on for whoever comes next. So torch's kernels of
these operators are wrapped, once; outside of such tasks nothing else changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pipert import _torch
from pipert.batch.tensors import tensors_of
from pipert.errors import TransformError
from pipert.layers.random_numbers import current_task

_NAMES = ("cond", "switch", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention")
_TRACING = ("FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode")
"""Modes in which operations are being traced, or run on tensors without data."""


@functools.cache
def refuse_at_once() -> None:
    """Refuse them from now on, in tasks of runs in which several workers compute at once."""
    autograd = _torch.autograd_key
    for name in _NAMES:
        operator = _torch.higher_order.get(name)
        if operator is not None and autograd in operator.py_kernels:
            kernel = operator.py_kernels.pop(autograd)
            operator.py_impl(autograd)(_checked(name, kernel))


def _checked(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def check(*args: Any, **kwargs: Any) -> Any:
        task = current_task() if torch.is_grad_enabled() else None
        is_traced = any(type(mode).__name__ in _TRACING for mode in _torch.dispatch_modes())
        if task is not None and task.run.is_concurrent and not is_traced:
            if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))[0]):
                raise TransformError(
                    f"a layer calls torch's {name} with gradients, for which torch makes graphs "
                    "with state of the whole process, while other workers compute. Compile the "
                    "layer (torch.compile), use torch.where, or a plain if or for; or take one "
                    "micro-batch, chunks=1, and checkpoint='never'"
                )
        return kernel(*args, **kwargs)

    return check
