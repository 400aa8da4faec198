"""Which calls of torch functions a function mode of the model's own code inspects, and when."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipert._torch import (
    function_mode_at,
    function_mode_count,
    pop_function_mode,
    push_function_mode,
)

__all__: list[str] = []


METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "device", "dtype", "layout", "requires_grad", "grad_fn", "is_leaf", "ndim",
        "output_nr", "_version", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested",
        "is_mkldnn", "is_cpu", "retains_grad", "nbytes", "itemsize",
    )
) | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.__len__, Tensor.is_contiguous, Tensor.get_device,
}  # fmt: skip
"""Functions that read only a tensor's metadata, so their calls need no inspection."""

DEVICE_METADATA = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")
) | {Tensor.get_device}
"""Those of them whose result depends on the device of the partition that uses the tensor."""

GRADIENT_REQUESTS = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""Functions that run a backward at once."""

HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})
"""Functions that ask for the gradient of a tensor, when there is one."""


class Mode(Protocol):
    """A function mode that inspects calls while ``is_on`` is true."""

    is_on: bool


class Paused:
    """A block in which a mode inspects nothing. A class for speed: each call enters one."""

    __slots__ = ("_mode", "_was_on", "_was_on_top")

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        depth = function_mode_count()
        self._was_on_top = depth > 0 and function_mode_at(depth - 1) is self._mode
        if self._was_on_top:
            pop_function_mode()
        else:
            self._was_on, self._mode.is_on = self._mode.is_on, False

    def __exit__(self, *_: object) -> None:
        if self._was_on_top:
            push_function_mode(self._mode)
        else:
            self._mode.is_on = self._was_on
