"""Routes skips from the partition that stashes straight to those that pop."""

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
    """A partition's input or output: a value, and the skips that arrive or leave with it."""

    value: Value
    skips: tuple[Value, ...]


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


def routes(
    partitions: Sequence[nn.Sequential], direct: bool = True
) -> tuple[PartitionSkips, ...]:
    """Returns the skips of each partition.

    All stashes and pops must match, see ``verify_skippables``.

    Args:
        direct: whether skips go straight to the partitions that pop them; otherwise each partition
            in between receives them and sends them on.
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
    of_partition = _of_partition if direct else _of_partition_on_the_way
    return tuple([of_partition(j, source, pops) for j in range(len(partitions))])


def _of_partition(
    j: int, source: Mapping[Key, int], pops: Mapping[Key, Mapping[int, int]]
) -> PartitionSkips:
    here = {key: by[j] for key, by in pops.items() if j in by}
    arriving = [(key, source[key]) for key in here if source[key] != j]
    leaving = [(key, k) for key in here if source[key] == j for k in sorted(pops[key]) if k != j]
    return PartitionSkips(tuple(arriving), tuple(leaving), here)


def _of_partition_on_the_way(
    j: int, source: Mapping[Key, int], pops: Mapping[Key, Mapping[int, int]]
) -> PartitionSkips:
    here = {key: by.get(j, 0) for key, by in pops.items() if source[key] <= j <= max(by)}
    arriving = [(key, j - 1) for key in here if source[key] != j]
    leaving = [(key, j + 1) for key in here if j != max(pops[key])]
    return PartitionSkips(tuple(arriving), tuple(leaving), here)


class Mail:
    """The skips in transit between partitions in one run.

    A partition posts its skips before it sends its output, so they are present once a later
    partition has received its input. Each is fetched once; the rest is dropped with the run.
    """

    def __init__(self) -> None:
        self._posted: dict[tuple[Key, int, int], Stashed] = {}  # its operations are atomic

    def post(self, key: Key, i: int, j: int, value: Value) -> None:
        """Post a skip of micro-batch ``i`` for partition ``j``."""
        self._posted[key, i, j] = Stashed(value)

    def fetch(self, key: Key, i: int, j: int) -> Value:
        """Take the skip posted for partition ``j``.

        Raises:
            RuntimeError: it has been modified in place.
        """
        return self._posted.pop((key, i, j)).get(key)

    def clear(self) -> None:
        """Drop the skips that will not be fetched."""
        self._posted.clear()

    def __repr__(self) -> str:
        return f"<Mail of {len(self._posted)} skips>"
