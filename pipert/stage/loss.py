"""Computes the loss of a mini-batch from the losses of its micro-batches.

Micro-batches' means are weighed by their rows. A sum where a mean is expected, or a mean beside a
``denominator``, would be silently wrong. So in some steps ``loss_fn`` is called again for each half
of the last micro-batch: a sum is that of the halves, a mean is between them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.tensors import describe, tensors_of
from pipert.errors import add_note
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed, TaskRng
from pipert.recompute.snapshot import Buffers
from pipert.schedules.action import FORWARD, Action
from pipert.workers.context import NOTHING

LossFunction = Callable[[Any, Any], Tensor]
"""Takes the output and the target of a micro-batch; returns its loss."""

StepFunction = Callable[..., Any]
"""Takes a micro-batch, calls the model, and returns its loss, or a pair of it and an output."""

_TIMES = 8
"""How many times of a single row are looked at: its output may be large."""

NO_LOSS_FN = (
    "loss_fn must be given, and by keyword, like the target: "
    "pipe.forward_backward(x, target=y, loss_fn=loss_fn); all that is given by position "
    "goes to the first layer"
)


def returned(loss: Any, _: Value) -> Any:
    """Return the loss that a step's own function has computed."""
    return loss


def loss_in(output: Value) -> Tensor | None:
    """Return the loss that a model has put into its output, if it has.

    That is its ``loss``, an attribute or an item; or a 0-dimensional tensor: its first element, or
    the output itself.
    """
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    found = output[0] if isinstance(output, tuple | list) and output else output
    return found if isinstance(found, Tensor) and found.dim() == 0 else None


def own_loss(output: Value, _: Value) -> Tensor:
    """Return the loss that the model itself has computed: the ``loss_fn`` of a step without one.

    Raises:
        TypeError: it has computed none.
    """
    loss = loss_in(output)
    if loss is None:
        raise TypeError(
            f"{NO_LOSS_FN}. Without it the step takes the model's own loss, but it returned "
            f"{describe(output)}, without one; does the call lack labels?"
        )
    return loss


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


class Loss:
    """The loss of a mini-batch: how each micro-batch's is computed, and how much it counts.

    Args:
        function: computes the loss of a micro-batch.
        targets: the target of each micro-batch.
        sizes: the number of rows of each micro-batch; empty if they came ready.
        reduction: ``'mean'`` or ``'sum'``.
        denominator: what the sum of all losses is divided by, if it is.
        scale: the factor for gradients.
        watch: looks at the last micro-batch's loss, in steps that are checked.
    """

    def __init__(
        self,
        function: LossFunction,
        targets: Sequence[Value],
        sizes: Sequence[int],
        reduction: str,
        denominator: float | Tensor | None,
        scale: float | Tensor,
        watch: HalvedRows | None,
    ) -> None:
        self._function, self._scale, self._denominator = function, scale, denominator
        self.targets, self.sizes, self.watch = targets, sizes, watch
        weights = sizes or [1] * len(targets)
        total = sum(weights)
        adds_up = reduction == "sum" or denominator is not None or not total
        self._shares = [1.0 if adds_up else weight / total for weight in weights]
        self.is_differentiable = False
        """Whether the loss of any micro-batch requires grad."""
        self.is_returned = function is returned
        """Whether the step's own function returns the loss, maybe with an output."""
        self.draws = not (self.is_returned or function is own_loss or _is_functional(function))
        """Whether the function draws random numbers, or might."""

    def compute(self, i: int, place: Place, seed: RunSeed, output: Value, target: Value) -> Tensor:
        """Compute the loss of micro-batch ``i``.

        An error gets a note that says so. Random numbers are those of the loss at this ``place``,
        the last partition's, in a run with this ``seed``.

        Raises:
            TypeError: the function did not return a real tensor of one element.
        """
        kind = f"loss {id(self._function)}"  # callers at once may have others
        drawing = TaskRng(seed, Action(kind, i, place.j), place.device) if self.draws else NOTHING
        try:
            with drawing:
                loss: Tensor = self._function(output, target)
                self._check(loss)
                if i == len(self.targets) - 1 and self.watch is not None:
                    with torch.no_grad():
                        self.watch.look(self._function, loss.detach(), output, target)
        except BaseException as error:
            if not self.is_returned:
                add_note(error, partial(_note, i, place, output, target))
            raise
        self.is_differentiable |= loss.requires_grad
        return loss

    def _check(self, loss: Any) -> None:
        name = "step" if self.is_returned else "loss_fn"
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            remedy = "reduce it over the rows of the micro-batch"
            if loss is None:
                remedy = "a model that computes its loss does so if it gets labels: labels=..."
            elif isinstance(loss, Real):
                remedy = "return the tensor itself, as in y.sum(), without .item() or float()"
            elif isinstance(loss, Mapping) or hasattr(loss, "loss"):
                remedy = "return its loss, such as output.loss, not the output of the model"
            elif isinstance(loss, tuple):
                remedy = (
                    "for a mean over what counts, return the sum and give forward_backward the "
                    "denominator of the mini-batch, such as (target != -100).sum(); for the "
                    "outputs, return_outputs=True"
                )
            raise TypeError(
                f"{name} must return a tensor of one element, got {describe(loss)}; {remedy}"
            )
        if loss.is_complex():
            raise TypeError(f"{name} must return a real number, got {describe(loss)}")

    def share_of(self, i: int, loss: Tensor) -> Tensor:
        """Return what micro-batch ``i`` adds to the loss of the mini-batch, or to its sum."""
        return loss * self._shares[i]

    def of_mini_batch(self, shares: Tensor) -> Tensor:
        """Return the loss of the mini-batch; ``nan`` if nothing counts."""
        denominator = self._denominator
        # Sums of losses may overflow in half precision where their mean does not.
        total = shares.sum(dtype=torch.promote_types(shares.dtype, torch.float32))
        if isinstance(denominator, Tensor):
            denominator = denominator.to(total.device)
        if denominator is not None:
            total = total / denominator
        return total.to(shares.dtype)

    def gradient_of(self, i: int, loss: Tensor) -> Tensor:
        """Return the gradient with which the backward of micro-batch ``i``'s loss begins."""
        factor: Any = self._scale
        dtype = torch.promote_types(loss.dtype, torch.float32)  # what half precision cannot hold
        if isinstance(factor, Tensor):
            factor = factor.to(loss.device, dtype)
        factor = factor * self._shares[i]
        if isinstance(self._denominator, Tensor):
            denominator = self._denominator.to(loss.device, dtype)
            factor = factor / (denominator + (denominator == 0))
        elif self._denominator:  # where nothing counts, the gradients are those of the sum: zeros
            factor = factor / self._denominator
        return torch.ones_like(loss).mul_(factor)


def _note(i: int, place: Place, output: Value, target: Value) -> str:
    where = place.describe(Action(FORWARD, i, place.j), ", loss_fn")
    note = f"{where}, output {describe(output)}, target {describe(target)}"
    if output is None:
        return f"{note}, because the last layer returned None; does it lack a return?"
    if target is None:
        return f"{note}; forward_backward got no target: does the call lack target=...?"
    return note


def _is_functional(function: Any) -> bool:
    """Return whether this is one of torch's loss functions, which draw no random numbers."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", "") == "torch.nn.functional"
