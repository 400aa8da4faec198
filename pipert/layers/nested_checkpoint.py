"""``torch.utils.checkpoint`` inside of a layer: refused around what it would not do again alike."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
import torch.utils.checkpoint

from pipert.errors import NestedCheckpointError

__all__: list[str] = []

_CHECKPOINT = torch.utils.checkpoint.__name__
_CHECKPOINTS = {
    torch.utils.checkpoint.__file__,
    # Where compiled layers save and restore the default generator around what they recompute.
    os.path.join(os.path.dirname(torch.__file__), "_prims", "rng_prims.py"),
}
# Calls the layers. What is further out is no layer's: a pipe may be inside of a checkpoint.
_CALL = os.path.join(os.path.dirname(__file__), "call.py")


def is_in_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` keeps what operations save here, to compute it again."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == _CHECKPOINT


def refuse_reentrant_checkpoint(error: RuntimeError) -> None:
    """Say what to do in a step about what torch says of its reentrant checkpoint.

    That adds to ``.grad`` itself, by a backward of its own in the middle of ``B[i,j]``: a part for
    each micro-batch, also in a step that fails.

    Raises:
        NestedCheckpointError: ``error`` comes from there.
    """
    if str(error).startswith("When use_reentrant=True"):
        raise NestedCheckpointError(
            "a layer used torch.utils.checkpoint with use_reentrant=True in forward_backward, "
            "where it would add a part of each gradient to .grad by itself. Use "
            "use_reentrant=False (transformers: gradient_checkpointing_enable("
            "gradient_checkpointing_kwargs={'use_reentrant': False})), or let the pipe checkpoint, "
            "with checkpoint='always'"
        ) from error


def refuse_nested_checkpoint(message: str) -> None:
    """Refuse ``torch.utils.checkpoint`` inside the current layer.

    Raises:
        NestedCheckpointError: with ``message``.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _CALL:
        if frame.f_code.co_filename in _CHECKPOINTS:
            raise NestedCheckpointError(
                f"{message}. Take it out of the layer and let the pipe checkpoint, with "
                "checkpoint='except_last' or 'always'"
            )
        frame = frame.f_back
