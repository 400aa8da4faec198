"""Computes weights that ``torch.nn.utils.parametrize.cached`` caches, before the tasks of a step.

Normally the first user of such a weight computes it. In a step that would be a task, whose
backward runs before those of other tasks that use the weight, and in a recomputation nobody would
compute it. So in a step the caller computes the weights before the tasks.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.utils import parametrize

from pipert._torch import is_caching_parametrizations
from pipert.layers.modules import modules_of


def compute_cached(partitions: Iterable[nn.Module]) -> None:
    """Compute all parametrized weights if they are being cached."""
    if not is_caching_parametrizations():
        return
    for partition in partitions:
        for module in modules_of(partition):
            if parametrize.is_parametrized(module):
                for name, _ in module.get_submodule("parametrizations").named_children():
                    getattr(module, name)
