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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

_Split = tuple[int, int, int, list[int]]
"""The longest block, the sums of the squares of costs and of counts, and the counts of layers."""


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
