"""Computes the loss of a mini-batch from the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.microbatch import TARGET, as_value, scatter_with_sizes
from pipert.batch.tensors import describe
from pipert.errors import add_note
from pipert.layers.generators import DRAWING
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed, Stream
from pipert.schedules.action import FORWARD, Action
from pipert.stage.counts import Counts

__all__: list[str] = []

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, float | Tensor]]
"""Takes an output and a target; returns the loss, or the sum of losses and their number."""


def split_step(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Value,
    chunks: int,
    function: LossFunction | None,
    reduction: str,
    scale: float | Tensor,
) -> tuple[list[Value], Loss]:
    """Return the micro-batches of a step, and the loss of their mini-batch.

    Raises:
        TypeError: ``function`` is missing, or no function.
        ValueError: arguments and target disagree on the number of rows, or ``reduction`` is
            unknown.
        RuntimeError: gradients are disabled.
    """
    function = check_step(function, reduction)
    named = {**kwargs, TARGET: target}
    split, sizes = scatter_with_sizes(args, named, chunks)
    inputs, targets = [], []
    for micro_batch in split:
        keywords = dict(micro_batch.kwargs)
        targets.append(keywords.pop(TARGET))
        inputs.append(as_value(micro_batch.args, keywords))
    return inputs, loss_of(function, targets, sizes, reduction, scale)


def check_step(function: Any, reduction: Any) -> LossFunction:
    """Return the loss function; refuse what a step cannot begin with, as :func:`split_step`."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if function is None:
        raise TypeError(
            "loss_fn must be given, and by keyword, like the target: "
            "pipe.forward_backward(x, target=y, loss_fn=loss_fn); all that is given by position "
            "goes to the first layer"
        )
    if not callable(function):
        raise TypeError(f"loss_fn must be a function of output and target, got {function!r}")
    if isinstance(function, type) and issubclass(function, nn.Module):
        name = function.__qualname__
        raise TypeError(
            f"loss_fn must be a function of output and target, got the class {name}; pass an "
            f"instance of it, as loss_fn={name}()"
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError(
            "forward_backward computes gradients, which are disabled here; call it outside of "
            "torch.no_grad() and torch.inference_mode(), or call the pipe for outputs alone"
        )
    checked: LossFunction = function
    return checked


def loss_of(
    function: LossFunction,
    targets: Sequence[Value],
    sizes: Sequence[int],
    reduction: str,
    scale: float | Tensor,
) -> Loss:
    """Return the loss of a mini-batch whose micro-batches have ``sizes`` rows."""
    rows = sum(sizes)
    shares = [1.0 if reduction == "sum" or not rows else size / rows for size in sizes]
    return Loss(function, targets, shares, scale, reduction == "mean", sizes)


def scale_of(
    scale: float | Tensor | torch.amp.GradScaler | None, devices: Sequence[torch.device]
) -> float | Tensor:
    """Return the factor for gradients. A ``GradScaler`` is asked for it, and remembers that.

    A tensor on a GPU is copied to the device of the loss by the caller: on his streams the copy
    comes after what computes the tensor and before what writes it next, as ``GradScaler.update``
    does.
    """
    if scale is None:
        return 1.0
    if isinstance(scale, torch.amp.GradScaler):
        one = torch.ones((), device=devices[0] if devices else None)
        return scale.scale(one)
    if isinstance(scale, float | int):
        return scale
    where = ""
    if isinstance(scale, Tensor):
        if scale.numel() == 1 and not (scale.is_complex() or scale.is_meta):
            scale = scale.detach().reshape(())
            return scale.to(devices[0]) if scale.is_cuda and devices else scale
        where = " on the meta device, without a value" if scale.is_meta else ""
    raise TypeError(f"loss_scale must be a number or a GradScaler, got {describe(scale)}{where}")


@dataclass(eq=False)
class Loss:
    """The loss of a mini-batch: how each micro-batch's is computed, and how much it counts."""

    _function: LossFunction
    targets: Sequence[Value]
    """The target of each micro-batch."""
    _shares: Sequence[float]
    """The weight of each micro-batch's loss in the mini-batch's, if it has no count."""
    _scale: float | Tensor
    """The factor for gradients."""
    _may_count: bool = True
    """Whether the function may return sums and counts."""
    sizes: Sequence[int] = ()
    """The number of rows of each micro-batch."""
    is_differentiable: bool = False
    """Whether the loss of any micro-batch requires grad."""

    draws: bool = field(init=False)
    """Whether the function draws random numbers, or might."""
    counts: Counts = field(init=False)
    """The counts of the micro-batches that have one: all or none."""
    _computed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.draws = not _is_functional(self._function)
        self.counts = Counts(self._shares)

    def compute(self, i: int, place: Place, seed: RunSeed, output: Value, target: Value) -> Tensor:
        """Compute the loss of micro-batch ``i``, or the sum of its losses.

        An error gets a note that says so. Random numbers are those of the loss at this ``place``,
        the last partition's, in a run with this ``seed``.

        Raises:
            TypeError: the function returned neither a tensor of one element nor a pair of such a
                tensor and a count, or it returned a pair for some micro-batches only.
            ValueError: the count is not valid.
        """
        try:
            if not self.draws:
                return self._checked(i, self._function(output, target))
            with Stream(seed, place.number_of_loss(i)), DRAWING.included():
                loss = self._function(output, target)
            return self._checked(i, loss)
        except BaseException as error:
            add_note(error, partial(_note, i, place, output, target))
            raise

    def _checked(self, i: int, loss: Any) -> Tensor:
        """Return the loss of micro-batch ``i``, and note its count."""
        count = None
        if isinstance(loss, tuple) and len(loss) == 2:
            loss, count = loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"loss_fn must return a tensor of one element, got {describe(loss)}; reduce it over"
                " the rows of the micro-batch, or return a sum and the number of its terms"
            )
        if loss.is_complex():
            raise TypeError(f"loss_fn must return a real number, got {describe(loss)}")
        self._check_that_all_are_alike(count is not None)
        if count is not None:
            self.counts.note(i, count, loss.device)
        self._computed += 1
        self.is_differentiable |= loss.requires_grad
        return loss

    def _check_that_all_are_alike(self, is_counted: bool) -> None:
        if is_counted and not self._may_count:
            raise TypeError(
                "loss_fn returned a sum and a count, whose quotient is a mean; with "
                "reduction='sum' it must return a tensor of one element"
            )
        if self._computed and is_counted != bool(self.counts):
            raise TypeError(
                "loss_fn returned a sum and a count for some micro-batches and a tensor alone for "
                "others; a mini-batch has one kind of mean, so return the pair for each"
            )

    def share_of(self, i: int, loss: Tensor) -> Tensor:
        """Return what micro-batch ``i`` adds to the loss of the mini-batch, or to its sum."""
        return loss if self.counts else loss * self._shares[i]

    def of_mini_batch(self, shares: Tensor) -> Tensor:
        """Return the loss of the mini-batch."""
        total = shares.sum()
        return (total / self.counts.total()).to(total.dtype) if self.counts else total

    def gradient_of(self, i: int, loss: Tensor) -> Tensor:
        """Return the gradient with which the backward of micro-batch ``i``'s loss begins."""
        scale = self._scale
        if isinstance(scale, Tensor):
            scale = scale.to(loss.device)
        factor = scale / self.counts.expected() if self.counts else self._shares[i] * scale
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
