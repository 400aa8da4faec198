"""Warns of a step whose loss is not that of the mini-batch, by its effect.

Micro-batches' means are weighed by their rows. That is the mean over the mini-batch only if each
row counts alike. Two mistakes are silent, so they are looked for in steps 1, 2, 4, 8 ... of a pipe,
where reading a GPU's numbers does not matter:

1. a mean over targets of which unequal numbers count, since some integers are ``IGNORED``;
2. a sum where a mean is expected, or a mean beside a ``denominator``. ``loss_fn`` is called again
   for each half of the last micro-batch: a sum is that of the halves, a mean is between them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.microbatch import Batch
from pipert.batch.tensors import tensors_of
from pipert.recompute.snapshot import Buffers
from pipert.schedules.plan import Schedule
from pipert.stage.loss import LossFunction, StepFunction, own_loss

_TIMES = 8
"""How many times of a single row are looked at: its output may be large."""
IGNORED = -100
"""The default ``ignore_index`` of torch's losses."""


def unequal_counts(targets: Sequence[Value], weights: Sequence[int]) -> list[int]:
    """Return how many targets count in each micro-batch; nothing if as its weight says, or all do.

    Args:
        targets: those of each micro-batch.
        weights: how much each micro-batch counts.
    """
    found = [list(filter(_may_ignore, tensors_of(target)[0])) for target in targets]
    ignoring = [c for c in zip(*found, strict=False) if any([(x == IGNORED).any() for x in c])]
    labels = [[each[i] for each in ignoring] for i in range(len(targets))]  # and no ids
    for k in (0, 1):  # a loss of text may leave out the first of each row, as it predicts the next
        parts = [[x[..., k:] if x.dim() > 1 else x for x in each] for each in labels]
        counts = [sum([int((x != IGNORED).sum()) for x in each]) for each in parts]
        pairs = zip(counts, weights, strict=True)
        is_even = all([count * sum(weights) == sum(counts) * weight for count, weight in pairs])
        if not is_even and sum(counts) < sum([x.numel() for each in parts for x in each]):
            return counts
    return []


def warn_of_unequal_counts(counts: Sequence[int], what: str) -> None:
    """Warn that a mean over ``counts`` targets of each micro-batch is not that of all."""
    shown = ", ".join(map(str, counts[:8])) + ", ..." * (len(counts) > 8)
    warnings.warn(
        f"the micro-batches have {shown} targets that count, which are not {IGNORED}. If {what} is "
        "a mean over these, the mean of the micro-batches is not that of the mini-batch: let "
        "loss_fn return their sum, such as with reduction='sum', and give forward_backward "
        "denominator=(target != -100).sum()",
        stacklevel=4,
    )


class HalvedRows:
    """Compares the loss of the last micro-batch with those of its halves.

    Args:
        rows: how many it has; 0 if that is unknown.
        is_divided: whether the losses are sums, to be divided by a ``denominator``.
        when_clear: called once it is known what ``loss_fn`` returns.
    """

    def __init__(self, rows: int, is_divided: bool, when_clear: Callable[[], None]) -> None:
        self._rows, self._is_divided, self._when_clear = rows, is_divided, when_clear
        self._losses: list[Tensor] = []

    def look(self, function: LossFunction, loss: Tensor, output: Value, target: Value) -> None:
        """Compute the loss of each half. A function that takes no other rows says nothing.

        A single row, or its last times, is compared with the same twice.
        """
        tensors, rebuild = tensors_of((output, target))
        sizes = [len(x) if x.dim() and not x.is_nested else 0 for x in tensors]
        rows = self._rows or next((size for size in reversed(sizes) if size), 0)
        is_single = rows == 1
        if is_single:
            times = [x.size(1) for x in tensors_of(target)[0] if x.dim() > 1 and not x.is_nested]
            pairs = [(x, size and x.dim() > 1) for x, size in zip(tensors, sizes, strict=True)]
            ends = [x[:, -_TIMES:] if deep and x.size(1) in times else x for x, deep in pairs]
            each = zip(ends, sizes, strict=True)
            tensors = tuple([torch.cat([x, x]) if size else x for x, size in each])
            sizes, rows = [2 * size for size in sizes], 2
        aside = Buffers(function.modules() if isinstance(function, nn.Module) else ())
        losses, half = [loss], rows // 2
        parts = [(0, half), (half, rows)] if half else []
        for first, last in [(0, rows), *parts] if is_single else parts:
            part = [
                x[first * size // rows : last * size // rows] if size and size % rows == 0 else x
                for x, size in zip(tensors, sizes, strict=True)
            ]
            try:
                found = aside.put_aside(function, *rebuild(tuple(part)))
            except Exception:  # noqa: BLE001  it may hold something of as many rows
                return
            losses += [found.detach()] if isinstance(found, Tensor) and found.numel() == 1 else []
        self._losses = losses[-3:]

    def check(self) -> None:
        """Warn of a sum without a denominator, and of a mean with one."""
        if len(self._losses) < 3:
            return
        loss, *halves = [float(each.double()) for each in self._losses]  # of all, and of parts
        rtol = 1e-3 if self._losses[0].itemsize > 2 else 0.05  # of what was added up in bfloat16
        counted = [half for half in halves if half == half]  # a mean of nothing is not a number
        is_sum = all(halves) and math.isclose(sum(halves), loss, rel_tol=rtol)
        low, high = min(counted, default=math.inf), max(counted, default=0.0)
        slack = rtol * abs(loss)
        is_mean = all(halves) and not is_sum and low - slack <= loss <= high + slack
        if is_sum or is_mean:
            self._when_clear()
        if is_mean if self._is_divided else is_sum:
            warnings.warn(_MEAN if self._is_divided else _SUM, UserWarning, stacklevel=6)


_SUM = (
    "loss_fn returns a sum, that of the losses of halves of rows, and the loss is the mean of the "
    "micro-batches' losses; give forward_backward reduction='sum', or a denominator=..."
)
_MEAN = (
    "loss_fn returns a mean, one between those of halves of rows, and the denominator divides the "
    "sum of the micro-batches' losses; let loss_fn return a sum, or leave out the denominator"
)


def _may_ignore(x: Tensor) -> bool:
    is_whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return is_whole and x.dim() > 0 and x.layout == torch.strided and not x.is_nested


class StepCall(NamedTuple):
    """The arguments of ``forward_backward``, checked."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: LossFunction
    own: StepFunction | None
    """What runs for each micro-batch in place of the model."""
    target: Value
    microbatches: Iterable[Any] | None
    chunks: int
    schedule: str | Schedule
    reduction: str
    denominator: float | Tensor | None
    loss_scale: float | Tensor | torch.amp.GradScaler | None
    return_outputs: bool


class LossChecks:
    """What the steps of a pipe have shown of their losses."""

    def __init__(self) -> None:
        self.steps = 0
        self._has_warned = False
        self._known = set[object]()

    def of_step(self, call: StepCall, batch: Batch) -> HalvedRows | None:
        """Check whether targets count alike; return what checks the loss, if it is to be."""
        self.steps += 1
        m, is_divided = len(batch.inputs), call.denominator is not None
        if self.steps & (self.steps - 1) or m == 1 and not is_divided or call.reduction == "sum":
            return None
        has_function = call.own is None and call.loss_fn is not own_loss
        if not (is_divided or self._has_warned):
            targets = batch.targets if has_function else batch.inputs
            if counts := unequal_counts(targets, batch.sizes or [1] * m):
                self._has_warned = True
                warn_of_unequal_counts(counts, "loss_fn" if has_function else "the model's loss")
        kind = getattr(call.loss_fn, "__code__", id(call.loss_fn)), is_divided
        is_mean = not isinstance(call.denominator, Tensor) and call.denominator == m
        if not has_function or call.target is None or kind in self._known or is_mean:
            return None
        return HalvedRows([0, *batch.sizes][-1], is_divided, partial(self._known.add, kind))
