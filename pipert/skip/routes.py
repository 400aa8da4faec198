"""Where skips go: from the partition that stashes straight to those that pop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from pipert._typing import Value
from pipert.skip.namespace import Key
from pipert.skip.store import Stashed, Store
from pipert.skip.verify import declarations

__all__: list[str] = []


class Carried(NamedTuple):
    """What a partition gets or returns: its value, and the skips that arrive or leave with it."""

    value: Value
    skips: tuple[Value, ...]


@dataclass(frozen=True)
class PartitionSkips:
    """The skips of one partition."""

    arriving: tuple[tuple[Key, int], ...]
    """Each that is popped here and stashed elsewhere, with the partition that stashes it."""
    leaving: tuple[tuple[Key, tuple[int, ...]], ...]
    """Each that is stashed here and popped elsewhere, with the partitions that pop it."""
    pops: Mapping[Key, int]
    """How many layers of this partition pop each, 0 for what is only stashed here."""

    def store(self, arriving: Sequence[Value]) -> Store:
        """The store for one task of the partition, with what ``arriving`` names in it."""
        store = Store(self.pops, frozenset(key for key, _ in self.leaving))
        for (key, _), value in zip(self.arriving, arriving, strict=True):
            store.receive(key, value)
        return store


def routes(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips | None, ...]:
    """The skips of each partition; ``None`` for those that neither stash nor pop.

    The stashes and pops of all together match, see ``verify_skippables``.
    """
    source: dict[Key, int] = {}
    pops: dict[Key, dict[int, int]] = {}
    for j, partition in enumerate(partitions):
        for unit in declarations(partition):
            for declared in unit:
                of_key = pops.setdefault(declared.key, {})
                of_key[j] = of_key.get(j, 0) + (not declared.pops)
                if declared.pops:
                    source[declared.key] = j
    return tuple([_of_partition(j, source, pops) for j in range(len(partitions))])


def _of_partition(
    j: int, source: Mapping[Key, int], pops: Mapping[Key, Mapping[int, int]]
) -> PartitionSkips | None:
    here = {key: by[j] for key, by in pops.items() if j in by}
    if not here:
        return None
    arriving = [(key, source[key]) for key in here if source[key] != j]
    leaving = [
        (key, tuple(sorted(k for k in pops[key] if k != j)))
        for key in here
        if source[key] == j and len(pops[key]) > 1
    ]
    return PartitionSkips(tuple(arriving), tuple(leaving), here)


class Mail:
    """What is between the partition that stashed and those that pop, in one run.

    A partition posts what leaves it before it sends its output on, so it is there when a later
    partition has received its input. Each is fetched once; the rest goes with the run.
    """

    def __init__(self) -> None:
        # With whether others get it, too. The operations of a dict are atomic.
        self._posted: dict[tuple[Key, int, int], tuple[Stashed, bool]] = {}

    def post(self, key: Key, i: int, partitions: Sequence[int], value: Value) -> None:
        """Leave a skip of micro-batch ``i`` for ``partitions``."""
        stashed = Stashed(value)
        for j in partitions:
            self._posted[key, i, j] = stashed, len(partitions) > 1

    def fetch(self, key: Key, i: int, j: int) -> Value:
        """Take what was left for partition ``j``.

        Raises:
            RuntimeError: it was modified in place since.
        """
        stashed, shared = self._posted.pop((key, i, j))
        return stashed.get(key, apart=shared)

    def __repr__(self) -> str:
        return f"<Mail of {len(self._posted)} skips>"
