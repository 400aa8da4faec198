"""What ranks tell one another beside values: that they go on, or why not.

A rank that raises alone leaves the others waiting for it. So before anything is sent, and again at
the end of each mini-batch, all ranks say how they are, over a group of their own on CPU, which no
device waits for: where one fails, all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from pipert.errors import PipertError
from pipert.schedules.action import FORWARD, Action

__all__ = ["RankError"]


class RankError(PipertError):
    """Another rank failed, or did not answer. The message says which, where, and by what."""


class Failure(NamedTuple):
    """An error on one rank, as the others are told of it."""

    place: tuple[int, ...]
    """Orders failures of one mini-batch as its schedule does: of the same micro-batch, what others
    may be a consequence of comes first."""
    text: str


def failure_of(error: BaseException, action: Action | None = None) -> Failure:
    """Describe an error, of an action if it is of any."""
    lines = [f"{type(error).__qualname__}: {error}", *getattr(error, "__notes__", ())]
    place: tuple[int, ...] = (-1,)
    if action is not None:
        goes = action.kind == FORWARD
        place = action.i, not goes, action.j if goes else -action.j
    return Failure(place, "\n".join(lines))


class Control:
    """The group in which ranks agree. Each method is called by all of them.

    Args:
        ranks: all that train one model, data-parallel replicas included.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self.group = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)

    def gather(self, own: Any) -> list[Any]:
        """What each rank brings, which must be picklable."""
        found: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(found, own, group=self.group)
        return found

    def agree(
        self, error: BaseException | None, own: Any = None, action: Action | None = None
    ) -> list[Any]:
        """Go on together: return what each rank brings, by rank.

        Raises:
            RankError: another rank has an error; or this rank's own.
        """
        failure = None if error is None else failure_of(error, action)
        gathered = self.gather((failure, own))
        if error is not None:
            raise error
        failed = [(bad, rank) for (bad, _), rank in zip(gathered, self._ranks, strict=True) if bad]
        if failed:
            first, rank = min(failed)
            raise RankError(f"rank {rank} failed: {first.text}")
        return [brought for _, brought in gathered]

    def require_same(self, what: str, given: Sequence[Any]) -> None:
        """Refuse, on all ranks, what each has ``given`` and must be the same."""
        if any(one != given[0] for one in given):
            by_rank = "; ".join(f"{r}: {one}" for r, one in zip(self._ranks, given, strict=True))
            raise ValueError(f"all ranks must give the same {what}, but by rank they are {by_rank}")

    def place(self, rank: int) -> int:
        """Where a rank is among those that agree."""
        return self._ranks.index(rank)

    def send(self, value: Any, rank: int) -> None:
        """Send an object to one rank."""
        dist.send_object_list([value], rank, group=self.group)

    def receive(self, rank: int) -> Any:
        """Receive what it sends."""
        found: list[Any] = [None]
        dist.recv_object_list(found, rank, group=self.group)
        return found[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self.group)

    def __repr__(self) -> str:
        return f"<Control of ranks {self._ranks}>"
