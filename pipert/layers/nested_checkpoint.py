"""``torch.utils.checkpoint`` inside of a layer: refused around what it would not do again alike."""

from __future__ import annotations

import inspect
import os

import torch.utils.checkpoint

from pipert.errors import NestedCheckpointError

__all__: list[str] = []

_CHECKPOINTS = {
    torch.utils.checkpoint.__file__,
    # Where compiled layers save and restore the default generator around what they recompute.
    os.path.join(os.path.dirname(torch.__file__), "_prims", "rng_prims.py"),
}
# Calls the layers. What is further out is no layer's: a pipe may be inside of a checkpoint.
_CALL = os.path.join(os.path.dirname(__file__), "call.py")


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
