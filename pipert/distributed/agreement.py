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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipert.distributed.groups import make_group
from pipert.errors import PipertError
from pipert.schedules.action import FORWARD, Action

__all__ = ["RankError"]

_SHORT = 4096  # bytes of data that the first message has room for
_HEAD = 8  # bytes that hold the size of the data


class RankError(PipertError):
    """Another rank failed, or did not answer. The message says which, where, and by what."""


class Failure(NamedTuple):
    """One rank's error, as reported to the other ranks."""

    place: tuple[int, ...]
    """Orders the failures of one mini-batch as its schedule does; within a micro-batch, a cause
    comes before its possible consequences."""
    text: str


def failure_of(error: BaseException, action: Action | None = None) -> Failure:
    """Describe an error, which was raised in ``action`` if one is given."""
    place: tuple[int, ...] = (sys.maxsize,)
    if action is not None:
        is_forward = action.kind == FORWARD
        place = action.i, not is_forward, action.j if is_forward else -action.j
    return Failure(place, _text_of(error))


def _text_of(error: BaseException) -> str:
    """Return the error's message with its notes, even if its own ``str()`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()


class Control:
    """The process group in which ranks agree. All ranks call its methods together.

    If the other ranks cannot be reached, a method raises :class:`RankError`, and from then on every
    method raises it at once: a rank that missed a message would mistake the next one for it.

    Args:
        ranks: all ranks that train one model, data-parallel replicas included.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._lost = ""
        with self.talking():
            self.group = make_group(ranks, "gloo")

    @contextmanager
    def talking(self, at: Callable[[], object] = lambda: "between mini-batches") -> Iterator[None]:
        """Talk to other ranks in the block; after an error there, this rank talks no more.

        Args:
            at: called after an error, to say in its message where this rank was.

        Raises:
            RankError: the block raised an exception, or an earlier one did.
        """
        me = dist.get_rank()
        if self._lost:
            raise RankError(f"{self._lost}; start all ranks anew")
        try:
            yield
        except BaseException as error:
            why = error.__cause__ or error  # torch's stages wrap it, and print their inputs
            self._lost = f"rank {me} lost the others {at()}: {_text_of(why)}"
            if not isinstance(error, Exception):
                raise
            raise RankError(f"a rank ended or did not answer: {self._lost}") from error

    @contextmanager
    def agreeing(self, to: str = "") -> Iterator[list[Any]]:
        """Run a block that may fail on some ranks; if it fails on one, all raise.

        Args:
            to: what the ranks begin, as in :meth:`agree`.

        Yields:
            A list to which this rank may append one object. After the block, it has the objects of
            all ranks, in their order.

        Raises:
            BaseException: this rank's own error.
            RankError: another rank failed.
        """
        brought: list[Any] = []
        failed: BaseException | None = None
        try:
            yield brought
        except BaseException as error:
            if self._lost:
                raise
            failed = error
        try:
            brought[:] = self.agree(brought[0] if brought else None, failed, to=to)
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
        failure = None if error is None else failure_of(error, action)
        with self.talking():
            reports = self._gather((to, failure, own))
        try:
            self.require_same("call", [begun for begun, _, _ in reports])
        except ValueError as differs:
            raise differs from error
        pairs = zip(reports, self.ranks, strict=True)
        failed = [(other, rank) for (_, other, _), rank in pairs if other is not None]
        if not failed:
            return [brought for _, _, brought in reports]
        first, rank = min(failed)
        try:
            if failure is not None and error is not None and failure.place == first.place:
                raise error
            raise RankError(f"rank {rank} failed: {first.text}") from error
        finally:
            del error  # it references this frame

    def _gather(self, own: Any) -> list[Any]:
        """Gather an object from each rank.

        Most are short and take one collective; ``all_gather_object`` takes two, and needs NumPy.
        """
        data = pickle.dumps(own)
        message = len(data).to_bytes(_HEAD) + data
        arrived = self._gather_bytes(message[: _HEAD + _SHORT], _HEAD + _SHORT)
        sizes = [int.from_bytes(one[:_HEAD]) for one in arrived]
        if max(sizes) > _SHORT:
            arrived = self._gather_bytes(message, _HEAD + max(sizes))
        pairs = zip(arrived, sizes, strict=True)
        return [pickle.loads(one[_HEAD : _HEAD + size]) for one, size in pairs]

    def _gather_bytes(self, message: bytes, size: int) -> list[bytearray]:
        """Gather a message from each rank, each filled up to ``size`` bytes."""
        arrived = [bytearray(size) for _ in self.ranks]
        sent = _tensor(bytearray(message.ljust(size)))
        dist.all_gather(list(map(_tensor, arrived)), sent, group=self.group)
        return arrived

    def require_same(self, what: str, given: Sequence[Any]) -> None:
        """Raise a ``ValueError`` on all ranks unless all have ``given`` the same."""
        if any(one != given[0] for one in given):
            by_rank = "; ".join(f"{r}: {one}" for r, one in zip(self.ranks, given, strict=True))
            raise ValueError(f"all ranks must give the same {what}, but by rank they are {by_rank}")

    def send(self, data: bytes, rank: int) -> None:
        """Send bytes to one rank. Unlike torch's object lists, this works without NumPy."""
        with self.talking():
            for message in (len(data).to_bytes(_HEAD), data):
                dist.send(_tensor(bytearray(message)), rank, group=self.group)

    def receive(self, rank: int) -> bytes:
        """Receive the bytes that a rank sends."""
        size = bytearray(_HEAD)
        with self.talking():
            dist.recv(_tensor(size), rank, group=self.group)
            data = bytearray(int.from_bytes(size))
            dist.recv(_tensor(data), rank, group=self.group)
        return bytes(data)

    def __repr__(self) -> str:
        return f"<Control of ranks {self.ranks}>"


def _tensor(message: bytearray) -> Tensor:
    """Return a tensor that shares the message's memory."""
    return torch.frombuffer(message, dtype=torch.uint8)
