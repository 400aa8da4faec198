"""What ranks tell one another beside values: that they go on, or why not.

A rank that raises alone leaves the others waiting for it. So before anything is sent, and again at
the end of each mini-batch, all ranks say how they are, over a group of their own on CPU, which no
device waits for: where one fails, all raise.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipert.distributed.groups import make_group
from pipert.errors import PipertError
from pipert.schedules.action import FORWARD, Action

__all__ = ["RankError"]

_SHORT = 4096  # bytes
_HEAD = 8  # bytes that say how many there are


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
    place: tuple[int, ...] = (sys.maxsize,)
    if action is not None:
        goes = action.kind == FORWARD
        place = action.i, not goes, action.j if goes else -action.j
    return Failure(place, _text_of(error))


def _text_of(error: BaseException) -> str:
    """What it says, notes included; also where its own ``str()`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()


class Control:
    """The group in which ranks agree. Each method is called by all of them.

    Where the others cannot be reached it raises :class:`RankError`, at once from then on: a rank
    that has missed a message would take the next one for it.

    Args:
        ranks: all that train one model, data-parallel replicas included.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._lost = ""
        self.group = self.make_group(ranks, "gloo")

    def make_group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Make a group of some of the ranks, with the time limit of the default one."""
        with self.talking():
            return make_group(ranks, backend)

    @contextmanager
    def talking(self, at: Callable[[], object] = lambda: "between mini-batches") -> Iterator[None]:
        """Talk to other ranks in the block: an error there is the last.

        Raises:
            RankError: there was one, now or before.
        """
        me = dist.get_rank()
        if self._lost:
            raise RankError(f"{self._lost}; start all ranks anew")
        try:
            yield
        except BaseException as error:
            why = error.__cause__ or error  # of a stage's, which says what went in
            self._lost = f"rank {me} lost the others {at()}: {_text_of(why)}"
            if not isinstance(error, Exception):
                raise
            raise RankError(f"a rank ended or did not answer: {self._lost}") from error

    @contextmanager
    def agreeing(self, to: str = "") -> Iterator[list[Any]]:
        """Do in the block what may fail on one rank: then all raise.

        Args:
            to: do what, as in :meth:`agree`.

        Yields:
            A list for what this rank brings; after the block, of what each has brought, by rank.

        Raises:
            BaseException: this rank's own error.
            RankError: another rank has one.
        """
        brought: list[Any] = []
        errors: list[BaseException | None] = []
        try:
            yield brought
        except BaseException as error:
            if self._lost:
                raise
            errors.append(error)
        own, failed = brought[0] if brought else None, errors.pop() if errors else None
        try:
            brought[:] = self.agree(own, failed, to=to)
        finally:
            del failed  # it references this frame

    def agree(
        self,
        own: Any,
        error: BaseException | None = None,
        action: Action | None = None,
        to: str = "",
    ) -> list[Any]:
        """Go on together: return what each rank brings, which can be pickled, by rank.

        Args:
            own: what this rank brings.
            error: what has failed here, if anything.
            action: where.
            to: what the ranks begin, which each might begin alone.

        Raises:
            ValueError: they begin different things.
            BaseException: this rank's own error.
            RankError: another rank has one that comes first.
        """
        failure = None if error is None else failure_of(error, action)
        with self.talking():
            found = self._gather((to, failure, own))
        try:
            self.require_same("call", [begun for begun, _, _ in found])
        except ValueError as differs:
            raise differs from error
        failed = [(bad, rank) for (_, bad, _), rank in zip(found, self._ranks, strict=True) if bad]
        if not failed:
            return [brought for _, _, brought in found]
        first, rank = min(failed)
        try:
            if failure is not None and error is not None and failure.place == first.place:
                raise error
            raise RankError(f"rank {rank} failed: {first.text}") from error
        finally:
            del error  # it references this frame

    def _gather(self, own: Any) -> list[Any]:
        """What each rank has: in one message from each if it is short, as it mostly is."""
        data = pickle.dumps(own)
        size = len(data).to_bytes(_HEAD)
        arrived = self._messages(size + data[:_SHORT], _HEAD + _SHORT)
        sizes = [int.from_bytes(one[:_HEAD]) for one in arrived]
        if max(sizes) > _SHORT:
            arrived = self._messages(size + data, _HEAD + max(sizes))
        pairs = zip(arrived, sizes, strict=True)
        return [pickle.loads(one[_HEAD : _HEAD + size]) for one, size in pairs]

    def _messages(self, own: bytes, size: int) -> list[bytearray]:
        """A message from each rank, of the same size."""
        arrived = [bytearray(size) for _ in self._ranks]
        sent = _tensor(bytearray(own.ljust(size)))
        dist.all_gather(list(map(_tensor, arrived)), sent, group=self.group)
        return arrived

    def require_same(self, what: str, given: Sequence[Any]) -> None:
        """Refuse, on all ranks, what each has ``given`` and must be the same."""
        if any(one != given[0] for one in given):
            by_rank = "; ".join(f"{r}: {one}" for r, one in zip(self._ranks, given, strict=True))
            raise ValueError(f"all ranks must give the same {what}, but by rank they are {by_rank}")

    def place(self, rank: int) -> int:
        """Where a rank is among those that agree."""
        return self._ranks.index(rank)

    def send(self, value: Any, rank: int) -> None:
        """Send an object to one rank, which receives it."""
        with self.talking():
            dist.send_object_list([value], rank, group=self.group)

    def receive(self, rank: int) -> Any:
        """Receive an object that the rank sends."""
        received = [None]
        with self.talking():
            dist.recv_object_list(received, rank, group=self.group)
        return received[0]

    def __repr__(self) -> str:
        return f"<Control of ranks {self._ranks}>"


def _tensor(message: bytearray) -> Tensor:
    """Returns the bytes of a message as a tensor that shares their memory."""
    return torch.frombuffer(message, dtype=torch.uint8)
