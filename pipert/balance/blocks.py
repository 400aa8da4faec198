"""Splits layers into consecutive blocks, one per device, so that the longest block is minimal.

The usual methods are not enough. The heuristic of "Block Partitions of Sequences" (Bárány and
others), which torchgpipe uses, moves one boundary at a time to even out the blocks and assumes
equal devices: on random costs its longest block is 1.1 times the optimum on average and 1.6 times
at worst, and every micro-batch pays for that. Filling each device up to a limit is exact for equal
devices, but not for unequal ones, nor if some boundaries cost more: costs ``1 1 9 1`` on devices of
speeds ``10 1 10`` need no block above 1, but only if the first device leaves the second layer,
which it has room for, to the slow one, which would otherwise be left with the 9.

So a *probe* of a limit tracks every place where a block can end. Layers ``s`` to ``e - 1`` on
device *j* cost ``entry[s] + (cost[s] + ... + cost[e - 1]) / speeds[j] + exit[e - 1]``.

1. On device *j* that is ``(tail[e] - head[s]) / speeds[j]``. So, among all starts before ``e``, the
   one with the largest head decides whether a block can end at ``e`` within the limit, and one walk
   finds all ends.
2. The ends of device *j* are the starts of device *j + 1*. A limit is feasible if the last device
   can end at the last layer.
3. A feasible limit lowers the upper bound to the longest block of the partition that was found. An
   infeasible one raises the lower bound to the shortest block that was refused: with any limit
   below that, the probe would take the same course. Both bounds are costs of blocks (those refused
   far behind all starts count without their exit), so the search ends when they meet, without any
   tolerance.
4. The longest block determines the time. The layers on either side of it are then split in the same
   way among their own devices, so that no device gets a scrap just because it does not matter.

Floats are fractions, so all of this is exact: integers inside, ``Fraction`` for limits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

__all__: list[str] = []


def minimise_longest_block(
    costs: Sequence[float],
    speeds: Sequence[float],
    entry_costs: Sequence[float] | None = None,
    exit_costs: Sequence[float] | None = None,
) -> list[int]:
    """Returns the number of layers in each block of a partition whose longest block is minimal.

    The caller has checked the arguments: there are one or more speeds and no more than costs;
    costs, entry and exit costs (default: none) are finite, not negative and equally many; speeds
    are finite and positive. Entry and exit costs do not depend on the device's speed.
    """
    layers, n = len(costs), len(speeds)
    zeros = [0] * layers
    integers = _as_integers([*costs, *(entry_costs or zeros), *(exit_costs or zeros)])
    *integer_speeds, unit = _as_integers([*speeds, 1])
    scaled = [cost * unit for cost in integers[:layers]]
    chain = _Chain(scaled, integers[layers : 2 * layers], integers[2 * layers :], integer_speeds)
    counts = [0] * n
    pieces = [(0, chain)]
    while pieces:
        j, chain = pieces.pop()
        cuts = chain.best_cuts()
        blocks = chain.blocks(cuts)
        longest = max(blocks)
        settled = 0
        for i in [i for i, block in enumerate(blocks) if block == longest] + [len(blocks)]:
            if settled < i:
                pieces.append((j + settled, chain.part(cuts, settled, i)))
            if i < len(blocks):
                counts[j + i] = cuts[i + 1] - cuts[i]
            settled = i + 1
    return counts


def _as_integers(numbers: Sequence[float]) -> list[int]:
    """Scales ``numbers`` by the smallest integer that makes all of them integers."""
    ratios = [number.as_integer_ratio() for number in numbers]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _between(low: Fraction, high: Fraction) -> Fraction:
    """Returns a limit in ``[low, high)``; the geometric mean, about, if they are far apart."""
    if not low:
        return low
    ratio = high // low
    return low * math.isqrt(ratio) if ratio >= 4 else (low + high) / 2


class _Chain:
    """Consecutive layers and the devices they are split among."""

    def __init__(
        self, costs: list[int], entries: list[int], exits: list[int], speeds: list[int]
    ) -> None:
        self.costs, self.entries, self.exits, self.speeds = costs, entries, exits, speeds
        totals = self.totals = [0, *accumulate(costs)]
        # For each speed, at each boundary: the head of a block that begins there, the tail of one
        # that ends there, and the largest tail of one that ends there or before.
        self.heads = dict.fromkeys(speeds, totals)
        self.tails = dict.fromkeys(speeds, totals)
        self.peaks = dict.fromkeys(speeds, totals)
        for v in self.heads:
            if any(entries):
                self.heads[v] = [t - v * x for t, x in zip(totals, entries, strict=False)]
            if any(exits):
                self.tails[v] = [t + v * x for t, x in zip(totals, [0, *exits], strict=True)]
                self.peaks[v] = list(accumulate(self.tails[v], max))

    def part(self, cuts: list[int], i: int, k: int) -> _Chain:
        """Returns the layers and devices of blocks ``i`` to ``k - 1``."""
        s, e = cuts[i], cuts[k]
        return _Chain(self.costs[s:e], self.entries[s:e], self.exits[s:e], self.speeds[i:k])

    def blocks(self, cuts: list[int]) -> list[Fraction]:
        """Returns the cost of each block between ``cuts``."""
        return [
            Fraction(self.tails[v][e] - self.heads[v][s], v)
            for (s, e), v in zip(pairwise(cuts), self.speeds, strict=True)
        ]

    def best_cuts(self) -> list[int]:
        """Returns the cuts that minimise the longest block (rule 3)."""
        layers, n = len(self.costs), len(self.speeds)
        cuts = [layers * j // n for j in range(n + 1)]
        low, high = Fraction(self.totals[-1], sum(self.speeds)), max(self.blocks(cuts))
        while low < high:
            found, refused = self._probe(_between(low, high), high)
            if found:
                cuts, high = found, max(self.blocks(found))
            else:
                low = refused
        return cuts

    def _probe(self, limit: Fraction, high: Fraction) -> tuple[list[int], Fraction]:
        """Returns cuts with no block above ``limit``; if there are none, the least cost refused."""
        layers, n = len(self.costs), len(self.speeds)
        capacities = [limit.numerator * speed // limit.denominator for speed in self.speeds]
        starts = [0]
        reached: list[list[int]] = []
        refused = [high]
        for j, floor in enumerate(self._floors(high)):
            starts = starts[bisect_left(starts, floor) :]
            if not starts:
                return [], min(refused)
            reached.append(starts)
            last_end = layers - n + 1 + j  # a layer is left for each later device
            starts, loads = self._ends(starts, self.speeds[j], capacities[j], last_end)
            if loads:
                refused.append(Fraction(min(loads), self.speeds[j]))
        if starts and starts[-1] == layers:
            return self._trace(reached, capacities), limit
        return [], min(refused)

    def _floors(self, high: Fraction) -> list[int]:
        """Returns for each device the first start from which it and later ones can take the rest.

        The limit is ``high``. Earlier starts are useless for any lower limit, and can be many.
        """
        capacities = [high.numerator * speed // high.denominator for speed in reversed(self.speeds)]
        total = self.totals[-1]
        return [bisect_left(self.totals, total - load) for load in accumulate(capacities)][::-1]

    def _ends(
        self, starts: list[int], speed: int, capacity: int, last_end: int
    ) -> tuple[list[int], list[int]]:
        """Returns the ends up to ``last_end`` within ``capacity``, and loads refused (rule 1)."""
        totals, heads, tails = self.totals, self.heads[speed], self.tails[speed]
        first, last = starts[0], starts[-1]
        # A block from the first start can end anywhere before ``walk``: no walk, they can be many.
        walk = bisect_right(self.peaks[speed], heads[first] + capacity, first + 1, last_end + 1)
        ends = list(range(first + 1, walk))
        k = bisect_left(starts, walk - 1)
        best = max(map(heads.__getitem__, starts[: k or 1]))
        refused: list[int] = []
        for e in range(walk, last_end + 1):
            if e <= last + 1 and starts[k] < e:
                best = max(best, heads[starts[k]])
                k += 1
            block = tails[e] - best
            if block <= capacity:
                ends.append(e)
                continue
            refused.append(block)
            if e > last and totals[e] - best > capacity:
                refused.append(totals[e] - best)  # no later end has less
                break
        return ends, refused

    def _trace(self, reached: list[list[int]], capacities: list[int]) -> list[int]:
        """Walks back from the last layer; each device takes about its share of what is left."""
        cuts = [len(self.costs)]
        power = [0, *accumulate(self.speeds)]
        for j in reversed(range(len(capacities))):
            end, speed, starts = cuts[-1], self.speeds[j], reached[j]
            rest = self.totals[end] * power[j] // power[j + 1]
            heads, least = self.heads[speed], self.tails[speed][end] - capacities[j]
            near = bisect_left(self.totals, least)  # no head is above its total
            options = starts[bisect_left(starts, near) : bisect_left(starts, end)]
            within = [s for s in options if heads[s] >= least]
            cuts.append(min((abs(self.totals[s] - rest), s) for s in within)[1])
        return cuts[::-1]
