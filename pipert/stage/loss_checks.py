"""Checks what a step is given, and warns of a loss that is not that of the mini-batch.

Micro-batches' means are weighed by their rows. That is the mean over the mini-batch only if each
row counts alike. Two mistakes are silent, so they are looked for in steps 1, 2, 4, 8 ... of a pipe,
where reading a GPU's numbers does not matter:

1. a mean over targets of which unequal numbers count, since some integers are ``IGNORED``;
2. a sum where a mean is expected, or a mean beside a ``denominator``, see :class:`.HalvedRows`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.microbatch import Batch
from pipert.batch.tensors import describe, tensors_of
from pipert.schedules.plan import Schedule
from pipert.stage.loss import (
    NO_LOSS_FN,
    HalvedRows,
    LossFunction,
    StepFunction,
    own_loss,
    returned,
)

IGNORED = -100
"""The default ``ignore_index`` of torch's losses."""


def check_step(
    loss_fn: Any, reduction: Any, step: Any = None, target: Value = None
) -> LossFunction:
    """Return the loss function; refuse what a step cannot begin with.

    Raises:
        ValueError: ``reduction`` is unknown.
        TypeError: neither it nor a ``step`` is a function, or both are given.
        RuntimeError: gradients are disabled.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError(
            "forward_backward computes gradients, which are disabled here; call it outside of "
            "torch.no_grad() and torch.inference_mode(), or call the pipe for outputs alone"
        )
    if step is not None:
        if loss_fn is not None or target is not None:
            raise TypeError("step returns the loss, so it takes no loss_fn and no target")
        if not callable(step):
            raise TypeError(f"step must be a function of a micro-batch, got {step!r}")
        return returned
    if loss_fn is None:
        raise TypeError(NO_LOSS_FN)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of output and target, got {loss_fn!r}")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = loss_fn.__qualname__
        raise TypeError(
            f"loss_fn must be a function of output and target, got the class {name}; pass an "
            f"instance of it, as loss_fn={name}()"
        )
    checked: LossFunction = loss_fn
    return checked


def denominator_of(
    denominator: float | Tensor | None, device: torch.device
) -> float | Tensor | None:
    """Return what the sum of losses is divided by: a number, or on a GPU a tensor, not read.

    Raises:
        TypeError: it is no number, or a tensor that requires grad.
        ValueError: it is negative or not finite, as far as is known without waiting.
    """
    if denominator is None:
        return None
    number = _number(denominator, device)
    if number is None or isinstance(denominator, Tensor) and denominator.requires_grad:
        raise TypeError(
            "denominator must be a number or a tensor of one element that requires no grad, such "
            f"as (target != -100).sum(), got {describe(denominator)}"
        )
    if isinstance(number, Tensor) and number.is_cuda:
        return number
    found = float(number)
    counted = isinstance(denominator, Tensor)  # in a batch perhaps nothing does
    if not (math.isfinite(found) and (found > 0 or counted and found == 0)):
        raise ValueError(f"denominator must be finite and positive, got {found}")
    return found


def scale_of(
    scale: float | Tensor | torch.amp.GradScaler | None, device: torch.device
) -> float | Tensor:
    """Return the factor for gradients; ``GradScaler.scale`` computes it, and marks it as used."""
    if scale is None:
        return 1.0
    if isinstance(scale, torch.amp.GradScaler):
        return scale.scale(torch.ones((), device=device))
    number = _number(scale, device)
    if number is None:
        raise TypeError(f"loss_scale must be a number or a GradScaler, got {describe(scale)}")
    return number


def _number(value: Any, device: torch.device) -> float | Tensor | None:
    """Return a number, or a tensor of one; ``None`` if ``value`` is neither.

    A tensor on a GPU is copied to the ``device`` of the loss by the caller: on his streams the copy
    comes after what computes the tensor and before what writes it next, as ``GradScaler.update``
    does.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            return None
        number: Tensor = value.detach().reshape(())
        return number.to(device) if number.is_cuda else number
    return float(value) if isinstance(value, Real) else None


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
