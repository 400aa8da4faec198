"""Running statistics that a recomputation leaves alone.

A normalisation layer in training mode updates its running statistics each time it is called, and a
recomputation calls it again. Telling the module not to would be seen by other threads that use it
at the same moment, so the functions it calls are told instead: they update a copy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

__all__: list[str] = []

_RUNNING = ("running_mean", "running_var")  # arguments 1 and 2 of these functions:
_NORMS = (F.batch_norm, F.instance_norm)


class KeepRunningStats(TorchFunctionMode):
    """While it is on, the normalisation layers of ``module`` update nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._counters = {
            id(norm.num_batches_tracked) for norm in _norms(module) if norm.track_running_stats
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.add_ and id(args[0]) in self._counters:
            return args[0]
        if func in _NORMS:
            args = tuple([_copy(arg) if k in (1, 2) else arg for k, arg in enumerate(args)])
            kwargs = {k: _copy(arg) if k in _RUNNING else arg for k, arg in kwargs.items()}
        return func(*args, **kwargs)


def may_update_running_stats(module: nn.Module) -> bool:
    """Whether calling ``module`` now might update running statistics."""
    return any(part.training and part._buffers for part in module.modules())


def _norms(module: nn.Module) -> list[_NormBase]:
    return [norm for norm in module.modules() if isinstance(norm, _NormBase)]


def _copy(running: Any) -> Any:
    if not isinstance(running, Tensor):
        return running
    with torch.no_grad():
        return running.clone()
