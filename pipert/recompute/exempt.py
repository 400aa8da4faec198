"""Exempts a layer from recomputation: it runs in ``F[i,j]`` alone.

Segments end before it and begin behind it. So ``R[i,j]`` goes on with what it has returned in
``F[i,j]``, and gradients pass through its one and only graph.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from torch import nn

__all__ = ["never_recompute"]

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
