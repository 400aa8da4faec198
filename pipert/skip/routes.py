"""Routes skips from the partition that stashes them straight to those that pop them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pipert._typing import Value
from pipert.skip.namespace import Key
from pipert.skip.store import ABSENT, Entry, Store
from pipert.skip.verify import declarations


@dataclass(frozen=True)
class PartitionSkips:
    """The skips of one partition."""

    arriving: tuple[tuple[Key, int], ...]
    """The skips popped here and stashed elsewhere, each with the stashing partition."""
    leaving: tuple[tuple[Key, int], ...]
    """The skips stashed here and popped elsewhere, each with the popping partition. A skip that
    several partitions pop appears once for each: its gradients arrive on separate streams, and may
    be added only after the nodes that wait for these."""
    pops: Mapping[Key, int]
    """How many layers of this partition pop each skip; 0 for those only stashed here."""

    def __bool__(self) -> bool:
        return bool(self.pops)

    def entries(self, arriving: Sequence[Value]) -> tuple[Entry, ...]:
        """Return what arrives as the entries of a store, to be popped here or sent on."""
        sent = Counter([key for key, _ in self.leaving])
        pairs = zip(self.arriving, arriving, strict=True)
        return tuple(
            [(key, self.pops[key] + sent[key], x) for (key, _), x in pairs if x is not ABSENT]
        )

    def store(self, entries: Sequence[Entry]) -> Store:
        """Makes the store for layers of the partition, filled with ``entries``."""
        return Store(self.pops, [key for key, _ in self.leaving], entries)

    def leave(self, entries: Sequence[Entry]) -> tuple[Value, ...]:
        """Return what leaves; ``ABSENT`` where the stashing layer did not run."""
        store = self.store(entries)
        return tuple([store.send(key) for key, _ in self.leaving])


def routes(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips, ...]:
    """Find the skips of each partition.

    The stashes and pops must match (``verify_skippables``).
    """
    source: dict[Key, int] = {}
    pops: dict[Key, dict[int, int]] = {}  # of each skip, in each partition that declares it
    for j, partition in enumerate(partitions):
        for unit in declarations(partition):
            for declared in unit:
                counts = pops.setdefault(declared.key, {})
                counts[j] = counts.get(j, 0) + (not declared.is_stash)
                if declared.is_stash:
                    source[declared.key] = j
    found = []
    for j in range(len(partitions)):
        local = {key: counts[j] for key, counts in pops.items() if j in counts}
        arriving = [(key, source[key]) for key in local if source[key] != j]
        stashed = [key for key in local if source[key] == j]
        leaving = [(key, k) for key in stashed for k in sorted(pops[key]) if k != j]
        found.append(PartitionSkips(tuple(arriving), tuple(leaving), local))
    return tuple(found)


def routes_along(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips, ...]:
    """Find the skips of each partition where a skip passes through all partitions on its way.

    A skip arrives at each partition after the one that stashes it, up to the last that pops it,
    and leaves for the next one. Partitions that only pass a skip on pop it 0 times.
    """
    straight = routes(partitions)
    hops = [(key, j, k) for j, skips in enumerate(straight) for key, k in skips.leaving]
    first = {key: j for key, j, _ in hops}
    last = {key: k for key, _, k in hops}  # of several hops of a skip, the farthest comes last
    found = []
    for j, skips in enumerate(straight):
        arriving = tuple([(key, j - 1) for key in first if first[key] < j <= last[key]])
        leaving = tuple([(key, j + 1) for key in first if first[key] <= j < last[key]])
        pops = {**dict.fromkeys([key for key, _ in (*arriving, *leaving)], 0), **skips.pops}
        found.append(PartitionSkips(arriving, leaving, pops))
    return tuple(found)
