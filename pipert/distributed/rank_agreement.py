"""Lets all ranks agree whether to go on, and raises on all of them if one has failed.

A rank that raises alone leaves the others waiting for it. So before anything is sent, and again at
the end of each mini-batch, all ranks report their state over a process group of their own, which is
on CPU so that no device waits for it. If one rank reports a failure, all raise.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipert.errors import PipertError
from pipert.schedules.action import FORWARD, Action

__all__ = ["RankError"]

_SIZE = 4096  # bytes of a first message; what it has no room for is in a second one
_HEAD = 8  # of these hold the size of the data


class RankError(PipertError):
    """Another rank failed, or did not answer. The message says which, where, and by what."""


class Agreement:
    """The process group in which ranks agree. All ranks call its methods together.

    If the other ranks cannot be reached, a method raises :class:`RankError`, and from then on every
    method raises it at once: a rank that missed a message would mistake the next one for it.

    Args:
        ranks: all ranks that train one model, data-parallel replicas included.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)  # the order of a process group
        self._lost = ""
        world: Any = dist.group.WORLD
        some = len(self.ranks) < dist.get_world_size()  # the others do not take part
        with self.talking():
            self._group = dist.new_group(
                self.ranks, world.get_group_store().timeout, "gloo", use_local_synchronization=some
            )

    @contextmanager
    def talking(self, at: Callable[[], object] = lambda: "between mini-batches") -> Iterator[None]:
        """Talk to other ranks in the block; after an error there, this rank talks no more.

        ``at`` is called after an error, and says where this rank was.
        """
        if self._lost:
            raise RankError(f"{self._lost}; start all ranks anew")
        try:
            yield
        except BaseException as error:
            why = error.__cause__ or error  # torch's stages wrap it, and print their inputs
            self._lost = f"rank {dist.get_rank()} lost the others {at()}: {_text_of(why)}"
            if not isinstance(error, Exception):
                raise
            raise RankError(f"a rank ended or did not answer: {self._lost}") from error

    @contextmanager
    def agreeing(self, to: str = "") -> Iterator[list[Any]]:
        """Run a block that may fail on some ranks; if it fails on one, all raise.

        To the list that it yields, this rank may append one object. After the block, the list has
        the objects of all ranks, in their order. For ``to`` see :meth:`agree`.
        """
        reports: list[Any] = []
        failed: BaseException | None = None
        try:
            yield reports
        except BaseException as error:
            if self._lost:
                raise
            failed = error
        try:
            reports[:] = self.agree(reports[0] if reports else None, failed, to=to)
        finally:
            del failed  # it references this frame

    def agree(
        self,
        own: Any,
        error: BaseException | None = None,
        action: Action | None = None,
        to: str = "",
    ) -> list[Any]:
        """Exchange objects and errors; return the objects of all ranks, in their order.

        Args:
            own: this rank's object, which can be pickled.
            error: this rank's error, if it failed.
            action: the action that failed.
            to: what the ranks begin, if a rank might begin it alone.

        Raises:
            ValueError: the ranks begin different things.
            BaseException: this rank's own error.
            RankError: another rank has an error that comes first.
        """
        failure = None if error is None else (_order_of(action), _text_of(error))
        with self.talking():
            reports = self._gather((to, failure, own))
        try:
            self.require_same("call", [begun for begun, _, _ in reports])
        except ValueError as differs:
            raise differs from error
        pairs = zip(reports, self.ranks, strict=True)
        failed = [(other, rank) for (_, other, _), rank in pairs if other is not None]
        if not failed:
            return [report for _, _, report in reports]
        (first, text), rank = min(failed)
        try:
            if failure is not None and error is not None and failure[0] == first:
                raise error
            raise RankError(f"rank {rank} failed: {text}") from error
        finally:
            del error  # it references this frame

    def require_same(self, what: str, given: Sequence[Any]) -> None:
        """Raise a ``ValueError`` on all ranks unless all have ``given`` the same."""
        if any(one != given[0] for one in given):
            by_rank = "; ".join(f"{r}: {one}" for r, one in zip(self.ranks, given, strict=True))
            raise ValueError(f"all ranks must give the same {what}, but by rank they are {by_rank}")

    def of(self, rank: int, reports: Sequence[Any]) -> Any:
        """Return a rank's object of those that :meth:`agree` returned."""
        return reports[self.ranks.index(rank)]

    def _gather(self, own: Any) -> list[Any]:
        """Gather an object from each rank: short ones in one collective, and without NumPy."""
        data = pickle.dumps(own)
        message = len(data).to_bytes(_HEAD) + data
        size = _SIZE
        while True:
            arrived = [bytearray(size) for _ in self.ranks]
            sent = _tensor(message[:size].ljust(size))
            dist.all_gather(list(map(_tensor, arrived)), sent, group=self._group)
            sizes = [_HEAD + int.from_bytes(one[:_HEAD]) for one in arrived]
            if max(sizes) <= size:
                break
            size = max(sizes)
        return [pickle.loads(one[_HEAD:end]) for one, end in zip(arrived, sizes, strict=True)]

    def send(self, data: bytes, rank: int, tag: int) -> list[dist.Work]:
        """Send bytes to one rank, which receives them by the same ``tag``; do not wait for it."""
        message = len(data).to_bytes(_HEAD) + data
        parts = message[:_SIZE].ljust(_SIZE), message[_SIZE:]
        sent = [dist.isend(_tensor(part), rank, self._group, tag) for part in parts if part]
        return [work for work in sent if work is not None]

    def receive(self, rank: int, tag: int) -> bytes:
        """Receive the bytes that a rank sends."""
        first = bytearray(_SIZE)
        dist.recv(_tensor(first), rank, self._group, tag)
        end = _HEAD + int.from_bytes(first[:_HEAD])
        rest = bytearray(max(0, end - _SIZE))
        if rest:
            dist.recv(_tensor(rest), rank, self._group, tag)
        return bytes(first + rest)[_HEAD:end]


def _tensor(message: bytes | bytearray) -> Tensor:
    """Return a tensor that shares the memory of a message that can be written to."""
    writable = message if isinstance(message, bytearray) else bytearray(message)
    return torch.frombuffer(writable, dtype=torch.uint8)


def _order_of(action: Action | None) -> tuple[int, ...]:
    """Return what orders the failures of one mini-batch as its schedule does.

    Within a micro-batch, a cause comes before its possible consequences.
    """
    if action is None:
        return (sys.maxsize,)
    is_forward = action.kind == FORWARD
    return action.i, not is_forward, action.j if is_forward else -action.j


def _text_of(error: BaseException) -> str:
    """Return the error's message with its notes, even if its own ``str()`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()
