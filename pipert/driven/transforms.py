"""Transforms of torch.func that a model's own code calls, and what crosses in them.

What a transform does not follow, as a tensor in a closure, is a tensor like others, and crosses as
outside of it. What it follows is wrapped. That has crossed unseen, to be found when the graph is
cut in ``B[i,j]``; with a graph of the transform's own, or on another device, it is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from pipert.batch.tensors import describe

__all__: list[str] = []


def refuse_to_cut(tensor: Tensor) -> None:
    """Refuse a tensor with a graph of a transform that has begun in an earlier partition.

    Raises:
        RuntimeError: it is one.
    """
    _refuse_followed(
        tensor,
        "such as torch.func.grad in a model's own code goes through layers of more than one "
        "partition, which a step of a pipe cannot cut; call the pipe and loss.backward(), or cut "
        "elsewhere",
    )


def refuse_to_move(tensor: Tensor) -> None:
    """Refuse a tensor on another device that a transform follows.

    Raises:
        RuntimeError: it is one.
    """
    _refuse_followed(
        tensor,
        "such as torch.func.vmap in a model's own code is given a tensor on another partition's "
        "device; give it tensor.clone(), which is made where it is called",
    )


def _refuse_followed(tensor: Tensor, what: str) -> None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise RuntimeError(f"a transform {what}: {describe(tensor)} on {tensor.device}")


def outside_of_transforms() -> AbstractContextManager[object]:
    """A block that is in no transform."""
    return temporarily_clear_interpreter_stack()
