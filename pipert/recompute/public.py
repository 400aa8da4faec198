"""What layers may say and ask about recomputation, and about their micro-batch.

Segments end before a layer that is exempt, and begin behind it. So ``R[i,j]`` goes on with what it
has returned in ``F[i,j]``, and gradients pass through its one and only graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

from torch import nn

from pipert.autograd.engine import (
    get_thread_local,
    remove_thread_local,
    set_thread_local,
)

__all__ = ["current_microbatch", "is_checkpointing", "is_recomputing", "never_recompute"]

# Set in the task's own copy of the caller's context variables.
checkpoint_here: ContextVar[bool] = ContextVar("pipert_checkpointing", default=False)
recompute_here: ContextVar[bool] = ContextVar("pipert_recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether this code runs in a forward that will be recomputed (section 3.2.4 of the paper).

    True inside a layer during ``F[i,j]`` of a checkpointed micro-batch, False elsewhere.

    >>> is_checkpointing()  # no layer
    False
    """
    return checkpoint_here.get()


def is_recomputing() -> bool:
    """Whether this code runs in a recomputation, i.e. inside a layer during ``R[i,j]``.

    A layer with side effects, such as counting its calls, can skip them here.

    >>> class Counting(nn.Linear):
    ...     calls = 0
    ...     def forward(self, x):
    ...         self.calls += not is_recomputing()
    ...         return super().forward(x)
    """
    return recompute_here.get()


_MICROBATCH = "pipert_microbatch"


def current_microbatch() -> int | None:
    """Return the number *i* of the micro-batch that the current code works on, counted from 0.

    In layers, in a model's own code, in ``loss_fn`` and in their hooks, during ``F[i,j]`` and
    ``R[i,j]``, and in ``forward_backward`` during ``B[i,j]`` and ``W[i,j]``. ``None`` elsewhere,
    such as in ``loss.backward()``, which is no task: it takes the last micro-batch first.

    >>> seen = {}
    >>> def keep(layer, args, output):  # a forward hook
    ...     seen[layer, current_microbatch()] = output.detach()
    """
    number: int | None = get_thread_local(_MICROBATCH)
    return number


# Torch's engine hands them on to its threads, as it does not do with context variables.
begin_microbatch: Callable[[int], None] = partial(set_thread_local, _MICROBATCH)
end_microbatch: Callable[[], None] = partial(remove_thread_local, _MICROBATCH)


@contextlib.contextmanager
def microbatch(i: int) -> Iterator[None]:
    """Make ``i`` the current micro-batch in the block."""
    before = current_microbatch()
    begin_microbatch(i)
    try:
        yield
    finally:
        end_microbatch() if before is None else begin_microbatch(before)


M = TypeVar("M", bound=nn.Module)

_MARK = "_pipert_never_recompute"


def never_recompute(layer: M) -> M:
    """Exempt ``layer`` from recomputation, whatever ``checkpoint`` says; return it.

    It runs once for each micro-batch and keeps what it saves. All other layers are recomputed as
    before. For a layer that cannot do the same twice, or is expensive and saves little.

    >>> model = nn.Sequential(nn.Linear(8, 8), never_recompute(nn.Dropout()), nn.Linear(8, 8))

    A layer is exempt as a whole, also if a module inside it was marked; marking a module around
    layers marks these. May be called before or after the pipe is made. Copies and pickles are
    marked, too; ``state_dict()`` and ``forward`` stay as they are.
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"layer must be a module, such as model.get_submodule(name), got {layer!r}")
    for module in layer.modules():
        module.__dict__[_MARK] = True
    return layer


def is_exempt(modules: Collection[nn.Module]) -> bool:
    """Return whether the layer that consists of ``modules`` is exempt from recomputation."""
    return any([_MARK in module.__dict__ for module in modules])
