"""Turns the sums and counts of micro-batches into the mean of a mini-batch.

Where rows do not count alike, as with ``ignore_index``, the mean of the micro-batches' means is not
the mean of the mini-batch: that is the sum of the sums divided by the sum of the counts. This
denominator is known when all micro-batches have gone forward, but the first gradients go backward
earlier. So:

1. Gradients are divided by the *expected* count, extrapolated from the counts known when the first
   micro-batch goes backward. All the way they have the magnitude of a mean's gradients: in half
   precision they overflow no sooner, and hooks of layers see the values they are used to.
2. When the step has succeeded, gradients are multiplied by the *correction*, the expected count
   divided by the real one, before any is delivered. There is no correction if all counts were
   known in time, as with ``'gpipe'``.

If nothing counts, the loss is ``nan`` and the gradients are those of the sums, zeros: both as in
the plain module.
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
"""A tensor only on a GPU, where reading the number would mean waiting for the device."""


class Counts:
    """The counts of one step's micro-batches. Used by the last stage, and by the caller afterwards.

    Args:
        shares: for each micro-batch, its share of the mini-batch's rows.
    """

    __slots__ = ("_all_were_known", "_counts", "_expected", "_shares")

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._counts: dict[int, Count] = {}
        self._expected: Count | None = None
        self._all_were_known = False  # when the first micro-batch went backward

    def __bool__(self) -> bool:
        return bool(self._counts)

    def note(self, i: int, count: Any, device: torch.device) -> None:
        """Note the count of micro-batch ``i``, whose sum was computed on ``device``.

        Raises:
            TypeError: ``count`` is not a number.
            ValueError: it is negative or not finite, as far as is known without waiting.
        """
        self._counts[i] = _checked(count, device)

    def expected(self) -> Count:
        """Return the count that divides the gradients of all micro-batches' sums."""
        if self._expected is None:
            total: Count = self.total()
            self._all_were_known = len(self._counts) == len(self._shares)
            if not self._all_were_known:
                total = total / sum(self._shares[i] for i in self._counts)
            self._expected = _or_one(total)
        return self._expected

    def correction(self) -> Count | None:
        """Return the factor for gradients divided by :meth:`expected`; ``None`` for no change."""
        if self._expected is None or self._all_were_known:
            return None
        return self._expected / _or_one(self.total())

    def total(self) -> Count:
        """Return the sum of the counts noted so far."""
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
            f"element without grad, got {describe(count)}{what}; to get the outputs as well, use "
            "return_outputs=True"
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
    """Return ``count`` as a divisor: one if it is zero."""
    if isinstance(count, Tensor):
        return count + (count == 0)
    return count or 1.0
