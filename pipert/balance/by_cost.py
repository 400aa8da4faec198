"""Balances layers by known costs: checks the user's arguments and leaves the rest to ``blocks``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pipert.balance.blocks import minimise_longest_block
from pipert.model.settings import whole

__all__ = ["balance_by_cost"]


def balance_by_cost(
    costs: Iterable[float],
    partitions: int,
    *,
    speeds: Iterable[float] | None = None,
    crossing: Iterable[float] | None = None,
) -> list[int]:
    """Returns the balance that minimises the slowest partition's time, for any costs.

    With equal devices, *m* micro-batches take ``sum + (m - 1) * longest``, where the sum over all
    partitions is the same for every balance: only the longest partition matters. No balance has a
    shorter one; among equally good ones it is the most even.

    >>> balance_by_cost([2, 3, 4, 1, 1], partitions=3)
    [2, 1, 2]
    >>> balance_by_cost([1, 1, 9, 1], partitions=3, speeds=[10, 1, 10])
    [1, 1, 2]
    >>> balance_by_cost([1, 1, 1, 1], partitions=2, crossing=[0, 1, 5, 0])
    [3, 1]

    Args:
        costs: the cost of each layer, in the order of the layers and in any unit.
        partitions: the number of devices; each takes one layer or more.
        speeds: the speed of each device, in the order of the devices and in any unit. On device *j*
            a partition takes ``sum(its costs) / speeds[j]``. Default: all are equal.
        crossing: the cost of a cut before each layer, in the unit of a cost over a speed. Both the
            sending and the receiving partition pay it. The first number is what the first
            partition pays for its input. Default: all zero. See :func:`crossing_sizes`.

    Returns:
        The number of layers in each partition, ready for ``Pipe(balance=...)``.

    Raises:
        ValueError: a cost or a number in ``crossing`` is negative, infinite or NaN; a speed is one
            of these or zero; there are no partitions, or more of them than layers; or ``speeds``
            does not have one number per partition, or ``crossing`` one per layer.
        TypeError: one of them is not a number, or ``partitions`` is not an integer.
    """
    layers = _numbers(costs, "costs")
    n = check_partitions(partitions, len(layers))
    devices = [1.0] * n if speeds is None else _numbers(speeds, "speeds")
    if len(devices) != n or not all(devices):
        raise ValueError(
            f"speeds must be positive, one for each of the {n} partitions, got {devices}; give the "
            "speed of each device, in the order of the devices"
        )
    if crossing is None:
        return minimise_longest_block(layers, devices)
    cuts = _numbers(crossing, "crossing")
    if len(cuts) != len(layers):
        raise ValueError(
            f"crossing must have one number for each of the {len(layers)} layers, got {len(cuts)}; "
            "give what it costs to cut before each layer, and 0 before the first"
        )
    return minimise_longest_block(layers, devices, cuts, [*cuts[1:], 0])


def check_partitions(partitions: Any, layers: int | None = None) -> int:
    """Returns ``partitions``, which must be from 1 up to the number of layers, if that is known."""
    n = whole(partitions, "partitions")
    if n < 1:
        raise ValueError(f"partitions must be 1 or more, got {n}; give the number of devices")
    if layers is not None and n > layers:
        raise ValueError(
            f"each partition needs a layer, got {n} partitions and {layers} layers; use fewer "
            "partitions"
        )
    return n


def _numbers(values: Iterable[float], name: str) -> list[float]:
    """Returns ``values`` as a list of finite numbers that are not negative."""
    numbers = [value if isinstance(value, int) else float(value) for value in values]
    for k, number in enumerate(numbers):
        if not 0 <= number < math.inf:  # not with NaN, either
            raise ValueError(
                f"{name} must be finite and not negative, but {name}[{k}] is {number!r}"
            )
    return numbers
