"""Counts: how the sums of micro-batches become the mean of a mini-batch.

Where rows do not count alike, as with ``ignore_index``, a mean of the means of micro-batches is not
the mean of the mini-batch, which is the sum of sums by the sum of counts. Its denominator is known
when all micro-batches have gone forward, and gradients go backward before. So:

1. They are divided by the count that is *expected*, from those that are known when the first
   micro-batch goes back. So they have the size of those of a mean all the way: in half precision
   they overflow no sooner, and hooks of layers see what they are used to.
2. When the step has succeeded they are multiplied by the quotient of the expected count and the
   real one, before any arrives: the *correction*. There is none if all counts were known in time,
   as with ``'gpipe'``.

Where nothing counts the loss is that of the plain module, ``nan``, and so are the gradients: those
of the sums, zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from pipert.batch.tensors import describe

__all__: list[str] = []

Count = float | Tensor
"""A tensor only on a GPU, which nobody waits for to read it."""


class Counts:
    """Of the micro-batches of one step. The last worker's; the caller's when all is over.

    Args:
        shares: of each micro-batch in the rows of the mini-batch.
    """

    __slots__ = ("_counts", "_expected", "_shares", "_were_known")

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._counts: dict[int, Count] = {}
        self._expected: Count | None = None
        self._were_known = False  # all of them, when the first micro-batch went back

    def __bool__(self) -> bool:
        return bool(self._counts)

    def note(self, i: int, count: Any, device: torch.device) -> None:
        """Note what the sum of micro-batch ``i`` counts for, computed on ``device``.

        Raises:
            TypeError: it is no number.
            ValueError: it is negative or not finite, as far as that is known without waiting.
        """
        self._counts[i] = _checked(count, device)

    def expected(self) -> Count:
        """What the gradients of sums are divided by on their way; the same for all."""
        if self._expected is None:
            total: Count = self.total()
            self._were_known = len(self._counts) == len(self._shares)
            if not self._were_known:
                total = total / sum(self._shares[i] for i in self._counts)
            self._expected = _or_one(total)
        return self._expected

    def correction(self) -> Count | None:
        """What gradients that were divided by :meth:`expected` are to be multiplied by."""
        if self._expected is None or self._were_known:
            return None
        return self._expected / _or_one(self.total())

    def total(self) -> Count:
        """Of those that are known."""
        return sum(count for _, count in sorted(self._counts.items()))

    def __repr__(self) -> str:
        return f"<Counts of {len(self._counts)} of {len(self._shares)} micro-batches>"


def _checked(count: Any, device: torch.device) -> Count:
    is_number = isinstance(count, Real)
    if isinstance(count, Tensor):
        is_number = count.numel() == 1 and not (count.requires_grad or count.is_complex())
    if not is_number:
        what = " that requires grad" if isinstance(count, Tensor) and count.requires_grad else ""
        raise TypeError(
            "the count that loss_fn returns beside the sum must be a number or a tensor of one "
            f"element without grad, got {describe(count)}{what}"
        )
    if isinstance(count, Tensor) and count.is_cuda and device.type == "cuda":
        return count.reshape(()).to(device, torch.float64)
    number = float(count)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"loss_fn returned a count of {number}; it must be finite and not negative"
        )
    return number


def _or_one(count: Count) -> Count:
    """The same, and one for zero: nothing is divided by that."""
    if isinstance(count, Tensor):
        return count + (count == 0)
    return count or 1.0
