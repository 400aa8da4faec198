"""The deterministic clock-cycle (section 3.2.1 of the paper) as data: nothing here runs anything.

Partition *j* of *n* computes micro-batch *i* of *m* in the task ``F[i,j]``. Clock *k* is the
diagonal ``i + j == k``, counted from 0. The total order is diagonal by diagonal, and within one by
partition. Everything ``F[i,j]`` needs, ``F[i,j-1]`` and ``F[i-1,j]``, lies on an earlier diagonal,
so a worker that takes tasks in this order can never wait for a task behind it in its own queue.

>>> print(Schedule(m=3, n=2))
k       0       1       2       3
j=0     F[0,0]  F[1,0]  F[2,0]
j=1             F[0,1]  F[1,1]  F[2,1]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipert.status import task_name

__all__: list[str] = []


class Forward(NamedTuple):
    """The forward task of micro-batch ``i`` on partition ``j``."""

    i: int
    j: int

    @property
    def kind(self) -> str:
        return "F"

    def __str__(self) -> str:
        return task_name(self.kind, self.i, self.j)


@dataclass(frozen=True)
class Schedule:
    """The forward tasks of ``m`` micro-batches over ``n`` partitions in the clock's order."""

    m: int
    n: int

    def __post_init__(self) -> None:
        if self.m < 1 or self.n < 1:
            raise ValueError(f"m and n must be positive, got m={self.m} and n={self.n}")

    def diagonals(self) -> Iterator[list[Forward]]:
        """The tasks of clock 0, 1, ..., ``m + n - 2``."""
        for k in range(self.m + self.n - 1):
            yield [Forward(k - j, j) for j in range(max(0, k - self.m + 1), min(self.n, k + 1))]

    def __iter__(self) -> Iterator[Forward]:
        for diagonal in self.diagonals():
            yield from diagonal

    def __len__(self) -> int:
        return self.m * self.n

    def position(self, i: int, j: int) -> int:
        """A number that grows along the total order; gaps are possible, ties are not."""
        return (i + j) * self.n + j

    def task_at(self, position: int) -> Forward:
        """The task whose position that is."""
        k, j = divmod(position, self.n)
        return Forward(k - j, j)

    def __str__(self) -> str:
        clocks = range(self.m + self.n - 1)
        rows = [["k", *map(str, clocks)]]
        for j in range(self.n):
            rows.append([f"j={j}"])
            rows[-1] += [str(Forward(k - j, j)) if 0 <= k - j < self.m else "" for k in clocks]
        width = 2 + max(len(cell) for row in rows for cell in row)
        return "\n".join("".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
