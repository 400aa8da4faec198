"""Consecutive layers in blocks, one for each device, so that the longest block is the shortest.

The usual ways come close and stop there. The heuristic of "Block Partitions of Sequences" (Bárány
and others), which torchgpipe uses, moves one boundary at a time to even out the blocks and knows
only equal devices: on random costs its longest block is 1.1 times as long as needed on average and
1.6 times at worst, and every micro-batch pays that. Letting each device take as much as a limit
allows is exact for equal devices, but not for others, nor if some starts cost more: costs
``1 1 9 1`` on devices of speeds ``10 1 10`` need no block above 1, and yet the first device must
not take the second layer, though it could, or the slow one is left with the 9.

So a *probe* keeps every place where a block can end. Layers ``s`` to ``e - 1`` on device *j* cost
``(entry[s] + cost[s] + ... + cost[e - 1]) / speeds[j]``.

1. Within a limit, a device can end at ``e`` if the cheapest of its starts before ``e`` allows it:
   one pass over the boundaries, with the cheapest so far, finds all ends.
2. The ends of device *j* are the starts of device *j + 1*. A limit is feasible if the last device
   can end at the last layer.
3. What is feasible is lowered to the longest block of the partition that was found, what is not is
   raised to the shortest block that was refused: below that, the probe would go the same way. Both
   are costs of blocks, so the search ends when they meet, without any tolerance.
4. The longest block settles the time. Layers on either side of it are then split likewise among
   their own devices, so that none gets a scrap only because it does not matter.

Floats are fractions, so all of this is exact: whole numbers inside, ``Fraction`` for limits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

__all__: list[str] = []


def minimise_longest_block(
    costs: Sequence[float], speeds: Sequence[float], entry_costs: Sequence[float] | None = None
) -> list[int]:
    """How many layers each device takes in a partition whose longest block is the shortest.

    For callers that have checked: one speed or more and no more than there are costs; costs and
    entry costs (default: none) finite, not negative and equally many; speeds finite and positive.
    """
    layers, n = len(costs), len(speeds)
    entries = [0] * layers if entry_costs is None else entry_costs
    whole = _whole([*costs, *entries])
    totals = [0, *accumulate(whole[:layers])]
    heads = [total - entry for total, entry in zip(totals[:-1], whole[layers:], strict=True)]
    counts = [0] * n
    pieces = [(0, _Chain(totals, heads, _whole(speeds)))]
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


@dataclass(frozen=True)
class _Chain:
    """Some layers and their devices. A block from ``s`` to ``e`` is ``totals[e] - heads[s]``."""

    totals: list[int]
    heads: list[int]
    speeds: list[int]

    def part(self, cuts: list[int], i: int, k: int) -> _Chain:
        """The layers and devices of blocks ``i`` to ``k - 1``."""
        s, e = cuts[i], cuts[k]
        return _Chain(self.totals[s : e + 1], self.heads[s:e], self.speeds[i:k])

    def blocks(self, cuts: list[int]) -> list[Fraction]:
        """What the blocks between ``cuts`` cost."""
        return [
            Fraction(self.totals[e] - self.heads[s], speed)
            for (s, e), speed in zip(pairwise(cuts), self.speeds, strict=True)
        ]

    def best_cuts(self) -> list[int]:
        """Where to cut for the shortest longest block (rule 3)."""
        layers, n = len(self.heads), len(self.speeds)
        cuts = [layers * j // n for j in range(n + 1)]
        low = Fraction(self.totals[-1] - self.totals[0], sum(self.speeds))
        high = max(self.blocks(cuts))
        while low < high:
            found, refused = self._probe(_between(low, high), high)
            if found:
                cuts, high = found, max(self.blocks(found))
            else:
                low = refused
        return cuts

    def _probe(self, limit: Fraction, high: Fraction) -> tuple[list[int], Fraction]:
        """Cuts with no block above ``limit``, or none and the shortest block that was refused."""
        layers, n = len(self.heads), len(self.speeds)
        loads = [limit.numerator * speed // limit.denominator for speed in self.speeds]
        ends, refused = [0], high
        reached: list[list[int]] = []
        for j in range(n):
            reached.append(ends)
            ends, loads_refused = self._ends(reached[j], loads[j], layers - (n - 1 - j))
            for load in loads_refused:
                refused = min(refused, Fraction(load, self.speeds[j]))
        return (self._trace(reached, loads), limit) if layers in ends else ([], refused)

    def _ends(self, starts: list[int], load: int, most: int) -> tuple[list[int], list[int]]:
        """Ends up to ``most`` from ``starts`` within ``load``, and loads that were refused."""
        ends: list[int] = []
        refused: list[int] = []
        cheapest = list(accumulate((self.heads[s] for s in starts), max))
        end = starts[0] if starts else most
        while end < most:
            before = bisect_right(starts, end)
            head = cheapest[before - 1]
            last = bisect_right(self.totals, head + load, end, most + 1) - 1
            if last > end:
                ends += range(end + 1, last + 1)
            else:
                refused.append(self.totals[end + 1] - head)
                last = starts[before] if before < len(starts) else most
            end = last
        return ends, refused

    def _trace(self, reached: list[list[int]], loads: list[int]) -> list[int]:
        """The cuts of one way back, in which each device takes about its share of what is left."""
        cuts = [len(self.heads)]
        power = [0, *accumulate(self.speeds)]
        for j in reversed(range(len(loads))):
            first, last = self.totals[0], self.totals[cuts[-1]]
            rest = first + (last - first) * power[j] // power[j + 1]
            starts = (s for s in reached[j] if s < cuts[-1])
            options = [s for s in starts if last - self.heads[s] <= loads[j]]
            cuts.append(min(options, key=lambda s: abs(self.totals[s] - rest)))
        return cuts[::-1]
