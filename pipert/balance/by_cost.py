"""Balances layers by known costs: checks the user's arguments and leaves the rest to ``blocks``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import SupportsIndex

from pipert.balance.blocks import minimise_longest_block

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
    shorter one; among equally good balances the choice is always the same.

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
        TypeError: a cost, a speed or an element of ``crossing`` is not a number, or ``partitions``
            is not an integer.
    """
    layers = check_numbers(costs, "costs", "layer", zero=True)
    n = check_partitions(partitions, len(layers))
    devices = [1.0] * n
    if speeds is not None:
        devices = check_numbers(speeds, "speeds", "device", zero=False)
    if len(devices) != n:
        raise ValueError(
            f"speeds must have one number for each of the {n} partitions, got {len(devices)}; give "
            "the speed of each device, in the order of the devices"
        )
    if crossing is None:
        return minimise_longest_block(layers, devices)
    cuts = check_numbers(crossing, "crossing", "layer", zero=True)
    if len(cuts) != len(layers):
        raise ValueError(
            f"crossing must have one number for each of the {len(layers)} layers, got {len(cuts)}; "
            "give what it costs to cut before each layer, and 0 before the first"
        )
    return minimise_longest_block(layers, devices, cuts, [*cuts[1:], 0])


def check_partitions(partitions: object, layers: int) -> int:
    """Returns ``partitions`` as an int, which must be from 1 up to the number of layers."""
    n = check_count(partitions)
    if n > layers:
        raise ValueError(
            f"each partition needs a layer, got {n} partitions and {layers} layers; use fewer "
            "partitions"
        )
    return n


def check_count(partitions: object) -> int:
    """Returns ``partitions`` as an int, which must be 1 or more."""
    if isinstance(partitions, bool) or not isinstance(partitions, SupportsIndex):
        raise TypeError(
            f"partitions must be a whole number, got {partitions!r}; give the number of devices"
        )
    n = index(partitions)
    if n < 1:
        raise ValueError(f"partitions must be 1 or more, got {n}; give the number of devices")
    return n


def check_numbers(values: Iterable[float], what: str, owner: str, *, zero: bool) -> list[float]:
    """Returns ``values`` as a list of finite, positive numbers; with ``zero``, 0 is allowed, too.

    ``what`` and ``owner`` name the list, and the owner of each number, in errors.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(
            f"{what} must be an iterable of numbers, one for each {owner}, got {values!r}; give a "
            "list of them"
        )
    numbers = list(values)
    wrong = [
        k for k, x in enumerate(numbers) if isinstance(x, bool) or not isinstance(x, int | float)
    ]
    if wrong:
        raise TypeError(
            f"{what} must be ints or floats, one for each {owner}, but "
            f"{_listed(what, numbers, wrong)}; use float(), or .tolist() of a tensor or an array"
        )
    # False for NaN; unlike math.isfinite, does not overflow for integers beyond the floats.
    wrong = [k for k, x in enumerate(numbers) if not (0 <= x < math.inf and (x or zero))]
    if wrong:
        raise ValueError(
            f"{what} must be finite and {'not negative' if zero else 'positive'}, but "
            f"{_listed(what, numbers, wrong)}; give each {owner} such a number"
        )
    return numbers


def _listed(what: str, numbers: list[float], places: list[int]) -> str:
    """Formats the numbers at the first few of ``places``, and how many there are."""
    named = ", ".join(f"{what}[{k}] is {numbers[k]!r}" for k in places[:3])
    return named + (f" and so on, {len(places)} in all" if len(places) > 3 else "")
