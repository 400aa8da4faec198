"""Puts buffers aside around recomputations.

A normalisation layer in training mode updates its running statistics at each call, and a
recomputation calls it again. So while ``R[i,j]`` runs, layers have copies of their buffers, and
afterwards the buffers are put back:

1. The buffers of modules in training mode are put aside, if they are small or have been written
   since the run's first forward. The others may be the weights of a quantised model, or a mask.
2. A run copies a buffer once, however many recomputations it has. Where a result depends on what
   they leave in the copy, :mod:`pipert.recompute.effects` refuses it.
3. Whoever finds copies, in a recomputation inside of another one or on another thread, computes
   with them. A forward of another caller loses its update that way (docs/batchnorm.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import setitem
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipert.batch.tensors import version

SMALL = 1 << 16  # elements; such a buffer is put aside even if nothing shows that it changes


class Buffers:
    """The buffers of a layer's ``modules``, before their first forward in the run."""

    __slots__ = ("_copies", "_modules", "_versions")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._versions = {  # by id
            id(buffer): version(buffer)
            for module in self._modules
            for buffer in module._buffers.values()
        }
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id, each beside its original

    def put_aside(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, and leave the buffers as they are."""
        before: list[tuple[Any, str, Any]] = []
        for module in self._modules:
            if module.training:
                for name, buffer in module._buffers.items():
                    if original_of(buffer) is buffer:
                        before.append((module._buffers, name, buffer))
        back = map(setitem, *zip(*before, strict=True)) if before else iter(())
        try:
            for buffers, name, buffer in before:
                if self._may_change(buffer):
                    buffers[name] = self._copy_of(buffer)
            return call(*args, **kwargs)
        finally:
            deque(back, 0)  # one call of C, which no interrupt cuts short

    def _may_change(self, buffer: Tensor | None) -> bool:
        if buffer is None or buffer.requires_grad:
            return False
        return buffer.numel() <= SMALL or self._versions.get(id(buffer)) != version(buffer)

    def _copy_of(self, buffer: Tensor) -> Tensor:
        found = self._copies.get(id(buffer))
        if found is None:
            with torch.no_grad():
                found = self._copies[id(buffer)] = buffer, buffer.clone()
            setattr(found[1], _ORIGINAL, ref(buffer))
        return found[1]


_ORIGINAL = "pipert_original"


def original_of(value: Any) -> Any:
    """Return the buffer that a layer has ``value`` in place of while it is recomputed."""
    original = getattr(value, _ORIGINAL, None) if isinstance(value, Tensor) else None
    return value if original is None else original()
