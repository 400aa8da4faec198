"""The loss of a step: how the losses of micro-batches make that of the mini-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipert._typing import Value
from pipert.batch.microbatch import as_value, scatter_with_sizes
from pipert.batch.tensors import describe
from pipert.layers.generators import DRAWING
from pipert.layers.random_numbers import RunSeed, Stream
from pipert.stage.counts import Counts

__all__: list[str] = []

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, float | Tensor]]
"""From an output and a target to the loss, or to the sum of losses and how many they are."""


def split_step(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Value,
    chunks: int,
    function: LossFunction,
    reduction: str,
    scale: float | Tensor,
) -> tuple[list[Value], Loss]:
    """The micro-batches of a step, and how their losses make that of the mini-batch.

    Raises:
        ValueError: arguments and target disagree on the number of rows, or ``reduction`` is
            unknown.
        RuntimeError: gradients are disabled.
    """
    check_step(function, reduction)
    named = {**kwargs, _TARGET: target}
    split, sizes = scatter_with_sizes(args, named, chunks)
    inputs, targets = [], []
    for micro_batch in split:
        own = dict(micro_batch.kwargs)
        targets.append(own.pop(_TARGET))
        inputs.append(as_value(micro_batch.args, own))
    return inputs, loss_of(function, targets, sizes, reduction, scale)


def check_step(function: Any, reduction: Any) -> None:
    """Refuse what no step can begin with; errors as in :func:`split_step`."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not callable(function):
        raise TypeError(f"loss_fn must be a function of output and target, got {function!r}")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError(
            "forward_backward computes gradients, which are disabled here; call it outside of "
            "torch.no_grad() and torch.inference_mode(), or call the pipe for outputs alone"
        )


def loss_of(
    function: LossFunction,
    targets: Sequence[Value],
    sizes: Sequence[int],
    reduction: str,
    scale: float | Tensor,
) -> Loss:
    """The loss of a mini-batch whose micro-batches have that many rows."""
    rows = sum(sizes)
    shares = [1.0 if reduction == "sum" or not rows else size / rows for size in sizes]
    return Loss(function, targets, shares, scale, reduction == "mean", sizes)


_TARGET = "target of forward_backward"  # no keyword that a layer could have


def scale_of(
    scale: float | Tensor | torch.amp.GradScaler | None, devices: Sequence[torch.device]
) -> float | Tensor:
    """What gradients are multiplied by; a ``GradScaler`` says, and remembers that it was asked.

    One on a GPU is brought to the device of the loss, in the caller: on his streams it comes after
    what computes it, and before what writes it next, as ``GradScaler.update`` does.
    """
    if scale is None:
        return 1.0
    if isinstance(scale, torch.amp.GradScaler):
        one = torch.ones((), device=devices[0] if devices else None)
        return scale.scale(one)
    is_number = isinstance(scale, Tensor) and scale.numel() == 1 and not scale.is_complex()
    if isinstance(scale, Tensor) and is_number and not scale.is_meta:
        scale = scale.detach().reshape(())
        return scale.to(devices[0]) if scale.is_cuda and devices else scale
    if isinstance(scale, float | int):
        return scale
    raise TypeError(f"loss_scale must be a number or a GradScaler, got {_looks_of(scale)}")


def _looks_of(scale: Any) -> str:
    on_meta = isinstance(scale, Tensor) and scale.is_meta
    return f"{describe(scale)}{' on the meta device, without a value' if on_meta else ''}"


@dataclass(eq=False)
class Loss:
    """How the loss of each micro-batch is computed, and what it counts for."""

    _function: LossFunction
    """Gets an output and a target."""
    targets: Sequence[Value]
    """Of each micro-batch."""
    _shares: Sequence[float]
    """Of each micro-batch's loss in that of the mini-batch, if it has no count."""
    _scale: float | Tensor
    """What gradients are multiplied by."""
    _may_count: bool = True
    """Whether the function may return sums and counts."""
    sizes: Sequence[int] = ()
    """The rows of each micro-batch."""
    is_differentiable: bool = False
    """Whether the loss of any micro-batch is."""

    draws: bool = field(init=False)
    """Whether it draws random numbers, or might."""
    counts: Counts = field(init=False)
    """Of the micro-batches that have one: all or none."""
    _computed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.draws = not _is_functional(self._function)
        self.counts = Counts(self._shares)

    def compute(self, i: int, number: int, seed: RunSeed, *args: Any) -> Tensor:
        """Compute the loss of micro-batch ``i``, or its sum, with random numbers of its own.

        These are the ones that ``number`` has in a run of this ``seed``.

        Raises:
            TypeError: the function did not return a tensor of one element, or a pair of one and a
                count; or that for some micro-batches only.
            ValueError: the count is none.
        """
        if not self.draws:
            loss: Any = self._function(*args)
        else:
            with Stream(seed, number), DRAWING.included():
                loss = self._function(*args)
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
        """What micro-batch ``i`` adds to the loss of the mini-batch, or to its sum."""
        return loss if self.counts else loss * self._shares[i]

    def of_mini_batch(self, shares: Tensor) -> Tensor:
        """The loss of the mini-batch."""
        total = shares.sum()
        return (total / self.counts.total()).to(total.dtype) if self.counts else total

    def gradient_of(self, i: int, loss: Tensor) -> Tensor:
        """The gradient of micro-batch ``i``'s own loss, from which its backward begins."""
        scale = self._scale
        if isinstance(scale, Tensor):
            scale = scale.to(loss.device)
        factor = scale / self.counts.expected() if self.counts else self._shares[i] * scale
        return torch.ones_like(loss).mul_(factor)


def _is_functional(function: Any) -> bool:
    """Whether it is one of torch's loss functions, which draw no random numbers."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", "") == "torch.nn.functional"
