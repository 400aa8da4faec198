"""Finds a ``torch.utils.checkpoint`` around code, and refuses what it would not repeat alike."""

from __future__ import annotations

import inspect
from typing import Any

import torch.utils.checkpoint

from pipert._torch import top_hooks
from pipert.errors import NestedCheckpointError

_CHECKPOINT = torch.utils.checkpoint.__name__
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__


def is_in_checkpoint() -> bool:
    """Whether a ``torch.utils.checkpoint`` around this code will recompute what operations save."""
    hooks: Any = top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == _CHECKPOINT


def checkpoint_around() -> object:
    """Return what stands for the ``torch.utils.checkpoint`` that runs this code, or ``None``.

    Call it where gradients are enabled but for a reentrant one, which disables them.
    """
    if is_in_checkpoint():
        return top_hooks(True)[0]
    frame = None if torch.is_grad_enabled() else inspect.currentframe()
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    return frame and frame.f_locals["ctx"]


def refuse_reentrant_checkpoint(error: RuntimeError) -> None:
    """Replace torch's error about its reentrant checkpoint by one that says what to do in a step.

    Such a checkpoint runs a backward of its own in the middle of ``B[i,j]``, which adds to
    ``.grad`` itself: a part for each micro-batch, even in a step that fails.

    Raises:
        NestedCheckpointError: ``error`` is about a reentrant checkpoint.
    """
    if str(error).startswith("When use_reentrant=True"):
        raise NestedCheckpointError(
            "a layer used torch.utils.checkpoint with use_reentrant=True in forward_backward, "
            "where it would add a part of each gradient to .grad by itself. Use "
            "use_reentrant=False (transformers: gradient_checkpointing_enable("
            "gradient_checkpointing_kwargs={'use_reentrant': False})), or let the pipe checkpoint, "
            "with checkpoint='always'"
        ) from error
