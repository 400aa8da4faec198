"""Tells a layer whether it will be recomputed, and whether it is being recomputed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["is_checkpointing", "is_recomputing"]

# Set in the task's own copy of the caller's context variables, so there is nothing to reset.
checkpoint_here: ContextVar[bool] = ContextVar("pipert_checkpointing", default=False)
recompute_here: ContextVar[bool] = ContextVar("pipert_recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether this code runs in a forward that will be recomputed (section 3.2.4 of the paper).

    True inside a layer during ``F[i,j]`` of a checkpointed micro-batch, False elsewhere.
    """
    return checkpoint_here.get()


def is_recomputing() -> bool:
    """Whether this code runs in a recomputation, i.e. inside a layer during ``R[i,j]``.

    A layer with side effects, such as counting its calls, can skip them here.
    """
    return recompute_here.get()


@contextlib.contextmanager
def checkpointing(value: bool = True) -> Iterator[None]:
    """Make :func:`is_checkpointing` true in the block, or false."""
    before = checkpoint_here.set(value)
    try:
        yield
    finally:
        checkpoint_here.reset(before)
