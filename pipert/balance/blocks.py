"""Consecutive layers in blocks, one for each device, so that the longest block is the shortest.

The usual ways come close and stop there. The heuristic of "Block Partitions of Sequences" (Bárány
and others), which torchgpipe uses, moves one boundary at a time to even out the blocks and knows
only equal devices: on random costs its longest block is 1.1 times as long as needed on average and
1.6 times at worst, and every micro-batch pays that. Letting each device take as much as a limit
allows is exact for equal devices, but not for others, nor if some boundaries cost more: costs
``1 1 9 1`` on devices of speeds ``10 1 10`` need no block above 1, and yet the first device must
not take the second layer, though it could, or the slow one is left with the 9.

So a *probe* keeps every place where a block can end. Layers ``s`` to ``e - 1`` on device *j* cost
``entry[s] + (cost[s] + ... + cost[e - 1]) / speeds[j] + exit[e - 1]``.

1. On device *j* that is ``tail[e] - head[s]``, over its speed. So of all starts before ``e``, the
   one with the largest head says whether a block can end there within a limit, and one walk finds
   all ends.
2. The ends of device *j* are the starts of device *j + 1*. A limit is feasible if the last device
   can end at the last layer.
3. What is feasible is lowered to the longest block of the partition that was found, what is not is
   raised to the shortest block that was refused: below that, the probe would go the same way. Both
   are costs of blocks (or, of one that would end far behind all starts, without its exit), so the
   search ends when they meet, without any tolerance.
4. The longest block settles the time. Layers on either side of it are then split likewise among
   their own devices, so that none gets a scrap only because it does not matter.

Floats are fractions, so all of this is exact: whole numbers inside, ``Fraction`` for limits.
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
    """How many layers each device takes in a partition whose longest block is the shortest.

    For callers that have checked: one speed or more and no more than there are costs; costs, entry
    and exit costs (default: none) finite, not negative and equally many; speeds finite and
    positive. What a block costs at its ends does not depend on its device's speed.
    """
    layers, n = len(costs), len(speeds)
    none = [0] * layers
    whole = _whole([*costs, *(entry_costs or none), *(exit_costs or none)])
    *whole_speeds, unit = _whole([*speeds, 1])
    scaled = [cost * unit for cost in whole[:layers]]
    chain = _Chain(scaled, whole[layers : 2 * layers], whole[2 * layers :], whole_speeds)
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


def _whole(numbers: Sequence[float]) -> list[int]:
    """``numbers`` in a unit in which all of them are whole."""
    ratios = [number.as_integer_ratio() for number in numbers]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _between(low: Fraction, high: Fraction) -> Fraction:
    """A limit from ``low`` up to, but less than ``high``; by magnitude if they are far apart."""
    if not low:
        return low
    ratio = high // low
    return low * math.isqrt(ratio) if ratio >= 4 else (low + high) / 2


class _Chain:
    """Some layers and their devices."""

    def __init__(
        self, costs: list[int], entries: list[int], exits: list[int], speeds: list[int]
    ) -> None:
        self.costs, self.entries, self.exits, self.speeds = costs, entries, exits, speeds
        totals = self.totals = [0, *accumulate(costs)]
        # By speed, for each boundary: of a block that begins there, of one that ends there, and of
        # the longest that ends there or before.
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
        """The layers and devices of blocks ``i`` to ``k - 1``."""
        s, e = cuts[i], cuts[k]
        return _Chain(self.costs[s:e], self.entries[s:e], self.exits[s:e], self.speeds[i:k])

    def blocks(self, cuts: list[int]) -> list[Fraction]:
        """What the blocks between ``cuts`` cost."""
        return [
            Fraction(self.tails[v][e] - self.heads[v][s], v)
            for (s, e), v in zip(pairwise(cuts), self.speeds, strict=True)
        ]

    def best_cuts(self) -> list[int]:
        """Where to cut for the shortest longest block (rule 3)."""
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
        """Cuts with no block above ``limit``, or none and the shortest block that was refused."""
        layers, n = len(self.costs), len(self.speeds)
        loads = [limit.numerator * speed // limit.denominator for speed in self.speeds]
        starts = [0]
        reached: list[list[int]] = []
        refused = [high]
        for j, floor in enumerate(self._floors(high)):
            starts = starts[bisect_left(starts, floor) :]
            if not starts:
                return [], min(refused)
            reached.append(starts)
            starts, loads_refused = self._ends(starts, self.speeds[j], loads[j], layers - n + 1 + j)
            if loads_refused:
                refused.append(Fraction(min(loads_refused), self.speeds[j]))
        if starts and starts[-1] == layers:
            return self._trace(reached, loads), limit
        return [], min(refused)

    def _floors(self, high: Fraction) -> list[int]:
        """From where on each device and those after it could take the rest within ``high``.

        Earlier starts are of no use within any lower limit, either, and there can be many.
        """
        most = [high.numerator * speed // high.denominator for speed in reversed(self.speeds)]
        total = self.totals[-1]
        return [bisect_left(self.totals, total - load) for load in accumulate(most)][::-1]

    def _ends(
        self, starts: list[int], speed: int, load: int, most: int
    ) -> tuple[list[int], list[int]]:
        """Ends up to ``most`` from ``starts`` within ``load``, and loads that were refused (1)."""
        totals, heads, tails = self.totals, self.heads[speed], self.tails[speed]
        first, last = starts[0], starts[-1]
        # Up to here the first start alone reaches all: no walk, as there can be many.
        walk = bisect_right(self.peaks[speed], heads[first] + load, first + 1, most + 1)
        ends = list(range(first + 1, walk))
        k = bisect_left(starts, walk - 1)
        best = max(map(heads.__getitem__, starts[: k or 1]))
        refused: list[int] = []
        for e in range(walk, most + 1):
            if e <= last + 1 and starts[k] < e:
                best = max(best, heads[starts[k]])
                k += 1
            block = tails[e] - best
            if block <= load:
                ends.append(e)
                continue
            refused.append(block)
            if e > last and totals[e] - best > load:
                refused.append(totals[e] - best)  # no later end has less
                break
        return ends, refused

    def _trace(self, reached: list[list[int]], loads: list[int]) -> list[int]:
        """The cuts of one way back, in which each device takes about its share of what is left."""
        cuts = [len(self.costs)]
        power = [0, *accumulate(self.speeds)]
        for j in reversed(range(len(loads))):
            end, speed, starts = cuts[-1], self.speeds[j], reached[j]
            rest = self.totals[end] * power[j] // power[j + 1]
            heads, least = self.heads[speed], self.tails[speed][end] - loads[j]
            near = bisect_left(self.totals, least)  # no head is above its total
            options = starts[bisect_left(starts, near) : bisect_left(starts, end)]
            within = [s for s in options if heads[s] >= least]
            cuts.append(min((abs(self.totals[s] - rest), s) for s in within)[1])
        return cuts[::-1]
