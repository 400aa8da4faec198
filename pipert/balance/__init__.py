"""Computes balances: how many layers each partition takes (section 3 of the paper).

>>> balance = balance_by_time(4, module, example)  # doctest: +SKIP

:func:`balance_by_time` uses the measured times of the layers, :func:`balance_by_size` the memory
they need, and :func:`balance_by_cost` any costs you have. All find the optimum. To derive costs of
your own, :func:`layer_times` and :func:`layer_sizes` return the measurements of the first two.
"""

from __future__ import annotations

from pipert.balance.by_cost import balance_by_cost
from pipert.balance.measured import (
    LayerSize,
    balance_by_size,
    balance_by_time,
    layer_sizes,
    layer_times,
)
from pipert.batch.microbatch import Arguments

__all__ = [
    "Arguments",
    "LayerSize",
    "balance_by_cost",
    "balance_by_size",
    "balance_by_time",
    "layer_sizes",
    "layer_times",
]
