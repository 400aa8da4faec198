"""Refuses ``torch.cond`` and its like, with gradients, in tasks that run at the same time.

torch makes graphs of the functions that they get, in each forward and again in its backward. A
thread that does so replaces ``nn.Module.__call__`` and flags of the whole process. Two at once
raise errors from inside torch, and leave the flags on for whoever comes next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pipert import _torch
from pipert.batch.tensors import tensors_of
from pipert.errors import TransformError
from pipert.layers.dispatch_keys import is_traced

_NAMES = ("cond", "switch", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention")


def refuse_where(are_concurrent: Callable[[], bool]) -> None:
    """Refuse them from now on, in all threads in which ``are_concurrent()`` returns ``True``."""
    autograd = _torch.parse_key("Autograd")
    for name in _NAMES:
        operator = _torch.higher_order.get(name)
        if operator is not None and autograd in operator.py_kernels:
            kernel = operator.py_kernels.pop(autograd)
            operator.py_impl(autograd)(_checked(name, kernel, are_concurrent))


def _checked(
    name: str, kernel: Callable[..., Any], are_concurrent: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def check(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and are_concurrent() and not is_traced():
            if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))[0]):
                raise TransformError(
                    f"a layer calls torch's {name} with gradients, for which torch makes graphs "
                    "with state of the whole process, while other workers compute. Compile the "
                    "layer (torch.compile), use torch.where, or a plain if or for; or take one "
                    "micro-batch, chunks=1, and checkpoint='never'"
                )
        return kernel(*args, **kwargs)

    return check
