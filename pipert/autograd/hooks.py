"""Saved-tensor hooks, pipert's own and the caller's; hooks on weights, hidden from parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from pipert._torch import hooks_on_grad, pop_hooks, push_hooks, tensor_hooks, top_hooks
from pipert.autograd.engine import get_thread_local, remove_thread_local, set_thread_local
from pipert.errors import NestedCheckpointError, RecomputationError

T = TypeVar("T")
Hook = Callable[[Any], Any]
Hooks = tuple[Hook, Hook] | None


class DropSaved(partial[Any]):
    """A pack hook of pipert's. A ``partial``, so that it is C if the function it calls is."""


def refuse(_: Any) -> Tensor:
    """Refuse to read a tensor that was not saved."""
    raise RecomputationError(
        "a backward came through the forward of a micro-batch whose activations are not kept: "
        "a layer ran it through itself, or has stored what a loss uses; exempt it with "
        "pipert.never_recompute, or use checkpoint='never'"
    )


def hooks_of_caller() -> Hooks:
    """Return the user's innermost saved-tensor hooks; ``None`` for pipert's own.

    Pipert's belong to a task alone: the threads of a run that a layer starts would mix up their
    order, so its graph is kept unchanged. The hooks of torch's checkpoint depend on order, too, and
    are refused.
    """
    hooks: Any = top_hooks(True)
    if hooks is None or isinstance(hooks[0], DropSaved):
        return None
    if checkpoint_around() is not None:
        raise NestedCheckpointError(
            "a pipe was called inside torch.utils.checkpoint, which tells saved tensors apart by "
            "their order; several threads save in no fixed one. Use the pipe's own checkpoint="
            "'always', or use_reentrant=True"
        )
    found: tuple[Any, Any] = hooks
    return found


def checkpoint_around() -> object:
    """Return what stands for the ``torch.utils.checkpoint`` around this code, or ``None``.

    It will recompute what operations save. A reentrant one is not seen.
    """
    hooks: Any = top_hooks(True)
    is_there = hooks is not None and getattr(hooks[0], "__module__", "") == _CHECKPOINT
    return hooks[0] if is_there else None


_CHECKPOINT = torch.utils.checkpoint.__name__


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Remove the current saved-tensor hooks in the block.

    Hooks that are on around a backward are not meant for what the backward computes.
    """
    removed = []
    while (pair := top_hooks(True)) is not None:
        pop_hooks()
        removed.append(pair)
    try:
        yield
    finally:
        while removed:
            push_hooks(*removed.pop())


_HIDDEN = "pipert_hidden"  # torch's engine hands it on to its threads


class _HookOnSum:
    """A hook on a weight, which is not called while a task computes its part of the gradient."""

    __slots__ = ("_hook", "_weight")

    def __init__(self, hook: Hook, weight: int) -> None:
        self._hook = hook
        self._weight = weight

    def __call__(self, tensor: Tensor) -> Tensor | None:
        is_part = self._weight in (get_thread_local(_HIDDEN) or ())
        return None if is_part else self._hook(tensor)


def hiding_partial_gradients(leaves: Iterable[Tensor], compute: Callable[..., T], *args: Any) -> T:
    """Return ``compute(*args)``, during which no hook on ``leaves`` is called."""
    hidden = set[int]()
    for leaf in leaves:
        for hooks in filter(None, (tensor_hooks(leaf), hooks_on_grad(leaf))):
            hidden.add(id(leaf))
            for number, hook in [*hooks.items()]:
                if not isinstance(hook, _HookOnSum):
                    hooks[number] = _HookOnSum(hook, id(leaf))
    if not hidden:
        return compute(*args)
    before = get_thread_local(_HIDDEN)
    hidden.update(before or ())
    try:
        set_thread_local(_HIDDEN, hidden)
        return compute(*args)
    finally:
        hidden.clear()  # no call of Python, so no interrupt comes before
        remove_thread_local(_HIDDEN) if before is None else set_thread_local(_HIDDEN, before)
