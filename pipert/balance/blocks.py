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

1. Within a limit, start ``s`` reaches the ends ``s + 1`` to some last one, or none at all if its
   first layer is too much for the device. Neighbouring starts of the first kind reach an interval.
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
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeAlias

__all__: list[str] = []

Interval: TypeAlias = tuple[int, int]
"""Boundaries between layers, from the first to the last, both included."""


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
    counts = [0] * n
    pieces = [(0, _Chain(whole[:layers], whole[layers:], _whole(speeds)))]
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
    """Some layers and their devices. A block from ``s`` to ``e`` is ``totals[e] - heads[s]``."""

    def __init__(self, costs: list[int], entries: list[int], speeds: list[int]) -> None:
        self.costs, self.entries, self.speeds = costs, entries, speeds
        self.totals = [0, *accumulate(costs)]
        self.heads = [t - entry for t, entry in zip(self.totals[:-1], entries, strict=True)]
        self.rising = not any(entries)
        self.first = [cost + entry for cost, entry in zip(costs, entries, strict=True)]
        self.by_first = sorted(range(len(costs)), key=self.first.__getitem__)
        self.sorted_first = [self.first[s] for s in self.by_first]

    def part(self, cuts: list[int], i: int, k: int) -> _Chain:
        """The layers and devices of blocks ``i`` to ``k - 1``."""
        s, e = cuts[i], cuts[k]
        return _Chain(self.costs[s:e], self.entries[s:e], self.speeds[i:k])

    def blocks(self, cuts: list[int]) -> list[Fraction]:
        """What the blocks between ``cuts`` cost."""
        return [
            Fraction(self.totals[e] - self.heads[s], speed)
            for (s, e), speed in zip(pairwise(cuts), self.speeds, strict=True)
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
        starts = [(0, 0)]
        reached: list[list[Interval]] = []
        refused = [high]
        for j, floor in enumerate(self._floors(high)):
            starts = [(max(a, floor), b) for a, b in starts if floor <= b]
            reached.append(starts)
            starts, loads_refused = self._ends(starts, loads[j], layers - (n - 1 - j))
            if loads_refused:
                refused.append(Fraction(min(loads_refused), self.speeds[j]))
        if starts and starts[-1][1] == layers:
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
        self, starts: list[Interval], load: int, most: int
    ) -> tuple[list[Interval], list[int]]:
        """Ends up to ``most`` from ``starts`` within ``load``, and loads that were refused."""
        runs, refused = self._runs(starts, load)
        ends: list[Interval] = []
        for a, b in runs:
            head = self.heads[b] if self.rising else max(self.heads[a : b + 1])
            last = bisect_right(self.totals, head + load, b + 1, most + 1) - 1
            if ends and a <= ends[-1][1]:
                ends[-1] = (ends[-1][0], max(last, ends[-1][1]))
            else:
                ends.append((a + 1, last))
            if last == most:
                break
            refused.append(self.totals[last + 1] - head)
        return ends, refused

    def _runs(self, starts: list[Interval], load: int) -> tuple[list[Interval], list[int]]:
        """``starts`` without those whose first layer is above ``load``, and what those need."""
        heavy = sorted(self.by_first[bisect_right(self.sorted_first, load) :])
        if not heavy:
            return starts, []
        runs: list[Interval] = []
        refused: list[int] = []
        for a, b in starts:
            for s in heavy[bisect_left(heavy, a) : bisect_right(heavy, b)]:
                refused.append(self.first[s])
                if a < s:
                    runs.append((a, s - 1))
                a = s + 1
            if a <= b:
                runs.append((a, b))
        return runs, refused

    def _trace(self, reached: list[list[Interval]], loads: list[int]) -> list[int]:
        """The cuts of one way back, in which each device takes about its share of what is left."""
        cuts = [len(self.costs)]
        power = [0, *accumulate(self.speeds)]
        for j in reversed(range(len(loads))):
            end = cuts[-1]
            rest, least = self.totals[end] * power[j] // power[j + 1], self.totals[end] - loads[j]
            first, middle = bisect_left(self.totals, least), bisect_left(self.totals, rest)
            options: list[int] = []
            for a, b in reached[j]:
                a, b = max(a, first), min(b, end - 1)
                if self.rising and a <= b:
                    options.append(min(max(middle, a), b))
                else:
                    options += [s for s in range(a, b + 1) if self.heads[s] >= least]
            cuts.append(min((abs(self.totals[s] - rest), s) for s in options)[1])
        return cuts[::-1]
