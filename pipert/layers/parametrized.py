"""Weights that ``torch.nn.utils.parametrize.cached`` computes once for all who use them.

The standard way is that whoever needs such a weight first computes it. In a step that would be a
task, whose backward comes before that of others that use the same weight, and in a recomputation
nobody would. So in a step the caller computes them, before the tasks.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.utils import parametrize

from pipert.layers.modules import modules_of

__all__: list[str] = []


def compute_cached(partitions: Iterable[nn.Module]) -> None:
    """Compute the weights that are to be cached, if any are."""
    if parametrize._cache_enabled:
        for partition in partitions:
            for module in modules_of(partition):
                if parametrize.is_parametrized(module):
                    for name, _ in module.get_submodule("parametrizations").named_children():
                        getattr(module, name)
