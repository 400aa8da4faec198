"""Brings tensors inside transforms of torch.func that a model's own code calls.

A tensor that the transform does not track, such as one in a closure, is not wrapped, and crosses
as it would outside. A tensor that it tracks is wrapped, and crosses unseen: the graph is cut there
in ``B[i,j]``. If it is in a graph of the transform's own, or on another device, it is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from pipert import _torch
from pipert._torch import is_wrapped
from pipert.batch.tensors import describe

__all__: list[str] = []


def refuse_to_cut(tensor: Tensor) -> None:
    """Refuse a tensor in the graph of a transform that began in an earlier partition.

    Raises:
        RuntimeError: a transform tracks the tensor.
    """
    _refuse_tracked(
        tensor,
        "such as torch.func.grad in a model's own code goes through layers of more than one "
        "partition, which a step of a pipe cannot cut; call the pipe and loss.backward(), or cut "
        "elsewhere",
    )


def refuse_to_move(tensor: Tensor) -> None:
    """Refuse a tensor on another device that a transform tracks.

    Raises:
        RuntimeError: a transform tracks the tensor.
    """
    _refuse_tracked(
        tensor,
        "such as torch.func.vmap in a model's own code is given a tensor on another partition's "
        "device; give it tensor.clone(), which is made where it is called",
    )


def _refuse_tracked(tensor: Tensor, reason: str) -> None:
    if is_wrapped(tensor):
        raise RuntimeError(f"a transform {reason}: {describe(tensor)} on {tensor.device}")


def outside_of_transforms() -> AbstractContextManager[object]:
    """Return a block that runs outside all transforms."""
    return _torch.outside_of_transforms()  # type: ignore[no-any-return]
