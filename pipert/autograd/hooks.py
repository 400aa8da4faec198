"""Saved-tensor hooks: those of pipert, which save nothing, and those of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipert.errors import RecomputationError

__all__: list[str] = []

Hook = Callable[[Any], Any]
Hooks = tuple[Hook, Hook] | None


class Forget(partial[Any]):
    """A saved-tensor hook that is ours. C, where what it calls is.

    Args:
        hooks: those of the caller, which a pipe inside of a layer takes over.
    """

    hooks: Hooks


def refuse(_: Any) -> Tensor:
    """Refuse to read what was not saved."""
    raise RecomputationError(
        "a backward came through the forward of a micro-batch whose activations are not kept: "
        "a layer ran it through itself, or has stored what a loss uses; use checkpoint='never'"
    )


def refuse_transform(error: RuntimeError) -> None:
    """Say what to do about what torch says of our hooks.

    Raises:
        RecomputationError: ``error`` comes from ``torch.func``.
    """
    if str(error).startswith("torch.func.") and "saved tensor hooks" in str(error):
        refused = RecomputationError(
            "a layer used torch.func.grad, vjp, jacrev or hessian in a partition that is "
            "recomputed, whose forward saves nothing; use checkpoint='never'"
        )
        for note in getattr(error, "__notes__", ()):
            refused.add_note(note)
        raise refused from error


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Put aside the saved-tensor hooks around a backward, which are not for what it computes."""
    hooks: Any = torch._C._autograd
    aside = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        hooks._pop_saved_tensors_default_hooks()
        aside.append(pair)
    try:
        yield
    finally:
        while aside:
            hooks._push_saved_tensors_default_hooks(*aside.pop())
