"""Routes skips from the partition that stashes straight to those that pop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pipert._typing import Value
from pipert.skip.namespace import Key
from pipert.skip.store import Store
from pipert.skip.verify import declarations

__all__: list[str] = []


@dataclass(frozen=True)
class PartitionSkips:
    """The skips of one partition."""

    arriving: tuple[tuple[Key, int], ...]
    """The skips popped here and stashed elsewhere, with the stashing partition."""
    leaving: tuple[tuple[Key, int], ...]
    """The skips stashed here and popped elsewhere, with the popping partition. A skip that several
    pop appears once for each: its gradients arrive on separate streams, and may
    be added only behind the nodes that wait for those."""
    pops: Mapping[Key, int]
    """The number of layers of this partition that pop each; 0 for skips only stashed here."""

    def __bool__(self) -> bool:
        return bool(self.pops)

    def store(self, arriving: Sequence[Value]) -> Store:
        """Makes the store for one task of the partition, filled with ``arriving``."""
        store = Store(self.pops, [key for key, _ in self.leaving])
        for (key, _), value in zip(self.arriving, arriving, strict=True):
            store.receive(key, value)
        return store


def routes(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips, ...]:
    """Find the skips of each partition.

    The stashes and pops of all together match, see ``verify_skippables``.
    """
    source: dict[Key, int] = {}
    pops: dict[Key, dict[int, int]] = {}
    for j, partition in enumerate(partitions):
        for unit in declarations(partition):
            for declared in unit:
                of_key = pops.setdefault(declared.key, {})
                of_key[j] = of_key.get(j, 0) + (not declared.is_stash)
                if declared.is_stash:
                    source[declared.key] = j
    found = []
    for j in range(len(partitions)):
        here = {key: by[j] for key, by in pops.items() if j in by}
        away = [(key, source[key]) for key in here if source[key] != j]
        left = [(key, k) for key in here if source[key] == j for k in sorted(pops[key]) if k != j]
        found.append(PartitionSkips(tuple(away), tuple(left), here))
    return tuple(found)


def routes_along(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips, ...]:
    """Find the skips of each partition where they travel along, from one to the next.

    A skip arrives at each partition behind the one that stashes it, up to the last that pops it,
    and leaves once. The partitions are named as in :func:`routes`, but those that a skip only
    passes pop it 0 times.
    """
    straight = routes(partitions)
    first = {key: j for j, skips in enumerate(straight) for key, _ in skips.leaving}
    last = {key: max(k for other, k in skips.leaving if other == key)
            for skips in straight for key, _ in skips.leaving}  # fmt: skip
    found = []
    for j, skips in enumerate(straight):
        arriving = tuple([(key, j - 1) for key in first if first[key] < j <= last[key]])
        leaving = tuple([(key, j + 1) for key in first if first[key] <= j < last[key]])
        pops = {**dict.fromkeys([key for key, _ in (*arriving, *leaving)], 0), **skips.pops}
        found.append(PartitionSkips(arriving, leaving, pops))
    return tuple(found)
