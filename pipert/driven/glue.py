"""Glue: a model's own code between its layers, and which of its calls need no inspection."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import _C, Tensor

__all__: list[str] = []


ABOUT = frozenset(
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
"""Functions that read a tensor's metadata and not its values."""

ABOUT_DEVICES = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")
) | {Tensor.get_device}
"""Those of them whose result depends on the device on which the tensor is used."""

ASKING = frozenset({
    Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward, Tensor.backward,
})  # fmt: skip
"""Functions that ask for gradients. All but the first run a backward at once."""


class Looking(Protocol):
    """A function mode that inspects the calls of glue, which is what runs while ``is_glue``."""

    is_glue: bool


class OutsideOfGlue:
    """A block in which a crossing inspects nothing. A class, since each call enters one."""

    __slots__ = ("_crossing", "_was_glue", "_was_on_top")

    def __init__(self, crossing: Looking) -> None:
        self._crossing = crossing

    def __enter__(self) -> None:
        depth = _C._len_torch_function_stack()
        self._was_on_top = depth > 0 and _C._get_function_stack_at(depth - 1) is self._crossing
        if self._was_on_top:
            _C._pop_torch_function_stack()
        else:
            self._was_glue, self._crossing.is_glue = self._crossing.is_glue, False

    def __exit__(self, *_: object) -> None:
        if self._was_on_top:
            _C._push_on_torch_function_stack(self._crossing)
        else:
            self._crossing.is_glue = self._was_glue
