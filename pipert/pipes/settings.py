"""``Settings``: what may be assigned to a pipe between its calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from pipert._typing import Value
from pipert.autograd.order import begin_numbers
from pipert.batch.tensors import tensors_of
from pipert.layers.compiling import refuse_at_once
from pipert.model.settings import check_checkpoint, check_chunks, check_timeout
from pipert.schedules.plan import Schedule, maker_of

_log = logging.getLogger("pipert")


class Settings(nn.Module):
    """The settings of a pipe; the arguments are ``Pipe``'s, for ``n`` partitions."""

    _partitions: tuple[nn.Sequential, ...]

    def __init__(
        self,
        n: int,
        chunks: int,
        checkpoint: str | Sequence[str] | None,
        schedule: str | Schedule,
        deferred_batch_norm: bool | None,
        timeout: float | None,
    ) -> None:
        super().__init__()
        self.chunks = chunks
        self.schedule = schedule
        self._checkpoint = check_checkpoint(checkpoint, n)
        self._deferred_batch_norm = bool(deferred_batch_norm)
        self.timeout = timeout
        refuse_at_once()

    @property
    def chunks(self) -> int:
        """The number of micro-batches, at most. May be assigned between calls."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = check_chunks(chunks)
        begin_numbers(self._chunks)  # nodes made before the first call get numbers above all turns

    @property
    def checkpoint(self) -> str | tuple[str, ...]:
        """Which micro-batches are recomputed: in all partitions, or in each one.

        May be assigned between calls.
        """
        return self._checkpoint or "except_last"  # ``None`` if the user has not chosen

    @checkpoint.setter
    def checkpoint(self, checkpoint: str | Sequence[str] | None) -> None:
        self._checkpoint = check_checkpoint(checkpoint, len(self._partitions))

    @property
    def schedule(self) -> str | Schedule:
        """The order of the tasks of a step. May be assigned between calls."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: str | Schedule) -> None:
        maker_of(schedule)  # refuses unknown ones
        self._schedule = schedule

    @property
    def timeout(self) -> float | None:
        """Seconds that a call may take, or ``None``. May be assigned between calls."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._timeout = check_timeout(timeout)

    @property
    def deferred_batch_norm(self) -> bool:
        """Whether running statistics are updated once for each call."""
        return self._deferred_batch_norm

    def _advise(self, inputs: Sequence[Value]) -> None:
        """Say at the first step that nothing overlaps, if there are rows that could be split."""
        n = len(self._partitions)
        has_rows = any([len(x) > 1 for x in tensors_of(inputs)[0] if x.dim()])
        if self._chunks == 1 < n and has_rows:
            _log.warning(
                "chunks=1: of %d partitions one computes at a time, since a mini-batch is not "
                "split; set pipe.chunks, such as to %d", n, 4 * n,
            )  # fmt: skip
