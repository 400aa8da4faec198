"""Protects running statistics and other buffers from recomputations.

A normalisation layer in training mode updates its running statistics at each call, and a
recomputation calls it again. Switching the module's updates off would affect other threads that
use it at the same moment, so the functions it calls are redirected instead: they update a copy.

Other layers change their buffers in their own ways, such as the power iteration of spectral
norm. Their results may depend on that, as they do there, so a recomputation
that changes a buffer is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from pipert.errors import RecomputationError

__all__: list[str] = []

_RUNNING = ("running_mean", "running_var")
# The positions of these among the arguments of functions that may update them.
_PLACES = {
    F.batch_norm: (1, 2),
    F.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
}

_IN_PLACE_OPERATORS = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow",
                 "iand", "ior", "ixor", "ilshift", "irshift")
)  # fmt: skip

COUNTING = (Tensor.add_, Tensor.add, Tensor.__add__, Tensor.__iadd__)
"""The ways in which a layer may count its calls: ``num_batches_tracked + 1``."""


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a call of a torch function writes to, judged by its name."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") or name in _IN_PLACE_OPERATORS
    return args[0] if args and in_place else None


class Buffers:
    """The buffers of a partition.

    Args:
        module: the partition; it is not kept.
    """

    __slots__ = ("counters", "names")

    def __init__(self, module: nn.Module) -> None:
        self.names = {id(buffer): name for name, buffer in module.named_buffers()}
        self.counters = {
            id(norm.num_batches_tracked)
            for norm in module.modules()
            if isinstance(norm, _NormBase) and norm.num_batches_tracked is not None
        }


class KeepBuffers(TorchFunctionMode):
    """Keeps normalisation layers from updating anything, and refuses updates by other layers."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self._buffers = buffers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in COUNTING and id(args[0]) in self._buffers.counters:
            return args[0]
        places = _PLACES.get(func)
        if places is not None:
            args = tuple([_copy(arg) if k in places else arg for k, arg in enumerate(args)])
            kwargs = {k: _copy(arg) if k in _RUNNING else arg for k, arg in kwargs.items()}
            return func(*args, **kwargs)
        changed = changed_by(func, args, kwargs)
        if id(changed) not in self._buffers.names:
            return func(*args, **kwargs)
        before = _copy(changed)
        result = func(*args, **kwargs)
        if not torch.equal(before, changed):
            with torch.no_grad():
                changed.copy_(before)
            raise RecomputationError(
                f"a layer changes its buffer {self._buffers.names[id(changed)]!r} when it is "
                "recomputed, so its result may differ from its forward's. Use "
                "checkpoint='never', or leave the buffer alone while pipert.is_recomputing()"
            )
        return result


def may_change_buffers(module: nn.Module) -> bool:
    """Whether calling ``module`` now might update running statistics or other buffers."""
    return any(part.training and part._buffers for part in module.modules())


def _copy(running: Any) -> Any:
    if not isinstance(running, Tensor):
        return running
    with torch.no_grad():
        return running.clone()
