"""Walks the modules of a partition, as each run does, and computes the weights they share."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.nn.utils import parametrize

from pipert._torch import is_caching_parametrizations


def modules_of(module: nn.Module) -> Collection[nn.Module]:
    """Return ``module`` and all modules inside it, each once, faster than ``modules()``."""
    found: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [module]
    while left:
        part = left.pop()
        if part not in found and part is not None:
            found[part] = None
            if part._modules:  # most have none
                left.extend(part._modules.values())
    return found


def check_initialised(model: nn.Module) -> None:
    """Refuse lazy parameters, which tasks would initialise, each for itself."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ValueError(f"{name!r} is not initialised; call the model once first")


def compute_cached(partitions: Iterable[nn.Module]) -> None:
    """Compute all parametrized weights if ``torch.nn.utils.parametrize.cached`` caches them.

    Normally the first user of such a weight computes it. In a step that would be a task, whose
    backward runs before those of other tasks that use the weight, and in a recomputation nobody
    would compute it. So in a step the caller computes the weights before the tasks.
    """
    if not is_caching_parametrizations():
        return
    for partition in partitions:
        for module in modules_of(partition):
            if parametrize.is_parametrized(module):
                for name, _ in module.get_submodule("parametrizations").named_children():
                    getattr(module, name)
