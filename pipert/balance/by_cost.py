"""Splits layers into consecutive blocks, one per device, so that the longest block is minimal.

Heuristics are not enough: the one that torchgpipe uses ("Block Partitions of Sequences", Bárány and
others) ends 1.1 times above the optimum on average, and every micro-batch pays for that. Filling
each device up to a limit is exact for equal devices only: costs ``1 1 9 1`` on devices of speeds
``10 1 10`` need no block above 1, but then the first device must leave a layer to the slow one.

So a dynamic program tries, for each device, all places where its block can begin and end:

1. Layers ``s`` to ``e - 1`` on device *j* cost
   ``entry[s] + (cost[s] + ... + cost[e - 1]) / speeds[j] + exit[e - 1]``.
2. Of all splits of the layers before ``e`` among the first devices it keeps the one whose longest
   block is shortest; of equally good ones that with the least sum of squares of costs, then of
   counts, so that no device gets a scrap just because another one takes longest anyway.
3. A block only grows as it begins earlier, which ends the search for its begin.

Floats are fractions, so all of this is exact: integers inside.

:func:`balance_by_cost` checks the user's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from pipert.model.settings import whole

__all__ = ["balance_by_cost"]

_Split = tuple[int, int, int, list[int]]
"""The longest block, the sums of the squares of costs and of counts, and the counts of layers."""


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
            partition pays for its input. Default: all zero. See :class:`LayerSize`.

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


def minimise_longest_block(
    costs: Sequence[float],
    speeds: Sequence[float],
    entry_costs: Sequence[float] | None = None,
    exit_costs: Sequence[float] | None = None,
    *,
    fits: Callable[[int, int, int], bool] = lambda j, s, e: True,
) -> list[int]:
    """Returns the number of layers in each block of the best split; none if no split fits.

    The caller has checked the arguments: there are one or more speeds and no more than costs;
    costs, entry and exit costs (default: none) are finite, not negative and equally many; speeds
    are finite and positive. Entry and exit costs do not depend on the device's speed. Device ``j``
    takes layers ``s`` to ``e - 1`` if ``fits(j, s, e)``, and then any part of them.
    """
    layers, n = len(costs), len(speeds)
    zeros = [0] * layers
    integers = _as_integers([*costs, *(entry_costs or zeros), *(exit_costs or zeros)])
    *integer_speeds, one = _as_integers([*speeds, 1])
    unit = math.lcm(*integer_speeds)  # of a time there are ``unit`` times as many
    totals = [0, *accumulate(integers[:layers])]
    entries = [unit * entry for entry in integers[layers : 2 * layers]]
    exits = [0, *[unit * leaving for leaving in integers[2 * layers :]]]
    best: dict[int, _Split] = {0: (0, 0, 0, [])}
    for j, speed in enumerate(integer_speeds):
        sums = [unit * one // speed * total for total in totals]
        # Each later device needs a layer, and the last one ends with the last layer.
        ends = range(j + 1, layers - n + j + 2) if j < n - 1 else [layers]
        found = {e: _last_block(e, best, sums, entries, exits[e], partial(fits, j)) for e in ends}
        best = {e: split for e, split in found.items() if split is not None}
        if not best:
            return []
    return best[layers][3]


def _as_integers(numbers: Sequence[float]) -> list[int]:
    """Scales ``numbers`` by the smallest integer that makes all of them integers."""
    ratios = [number.as_integer_ratio() for number in numbers]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _last_block(
    e: int, before: dict[int, _Split], sums: list[int], entries: list[int], leaving: int,
    fits: Callable[[int, int], bool],
) -> _Split | None:  # fmt: skip
    """Returns the best split of the layers before ``e``, given those on one device less."""
    found: _Split | None = None
    for s in range(e - 1, min(before) - 1, -1):
        least = sums[e] - sums[s] + leaving
        if found is not None and least > found[0] or not fits(s, e):
            break
        if s in before:
            cost = least + entries[s]
            longest, costs, counts, split = before[s]
            key = max(longest, cost), costs + cost**2, counts + (e - s) ** 2
            if found is None or key < found[:3]:
                found = *key, [*split, e - s]
    return found
