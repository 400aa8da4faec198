"""Computes the loss of a mini-batch from the losses of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.tensors import describe
from pipert.errors import add_note
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed, TaskRng
from pipert.schedules.action import FORWARD, Action

LossFunction = Callable[[Any, Any], Tensor]
"""Takes the output and the target of a micro-batch; returns its loss."""


StepFunction = Callable[..., Any]
"""Takes a micro-batch, calls the model, and returns its loss, or a pair of it and an output."""


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
        return _returned
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


NO_LOSS_FN = (
    "loss_fn must be given, and by keyword, like the target: "
    "pipe.forward_backward(x, target=y, loss_fn=loss_fn); all that is given by position "
    "goes to the first layer"
)


def _returned(loss: Any, _: Value) -> Any:
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


def loss_of(
    function: LossFunction,
    targets: Sequence[Value],
    sizes: Sequence[int],
    reduction: str,
    denominator: float | Tensor | None,
    scale: float | Tensor,
) -> Loss:
    """Return the loss of a mini-batch whose micro-batches have ``sizes`` rows, if they have."""
    weights = sizes or [1] * len(targets)
    total = sum(weights)
    adds_up = reduction == "sum" or denominator is not None or not total
    shares = [1.0 if adds_up else weight / total for weight in weights]
    return Loss(function, targets, shares, scale, denominator, sizes)


def denominator_of(
    denominator: float | Tensor | None, devices: Sequence[torch.device]
) -> float | Tensor | None:
    """Return what the sum of losses is divided by: a number, or on a GPU a tensor, not read.

    A tensor on a GPU is copied to the device of the loss by the caller, as in :func:`scale_of`.

    Raises:
        TypeError: it is no number, or a tensor that requires grad.
        ValueError: it is negative or not finite, as far as is known without waiting.
    """
    if denominator is None:
        return None
    is_number = isinstance(denominator, Real)
    if isinstance(denominator, Tensor):
        kind = denominator.is_complex() or denominator.is_meta or denominator.requires_grad
        is_number = denominator.numel() == 1 and not kind
    if not is_number:
        raise TypeError(
            "denominator must be a number or a tensor of one element that requires no grad, such "
            f"as (target != -100).sum(), got {describe(denominator)}"
        )
    if isinstance(denominator, Tensor) and denominator.is_cuda:
        return denominator.reshape(()).to(devices[0] if devices else denominator.device)
    number = float(denominator)
    counted = isinstance(denominator, Tensor)  # in a batch perhaps nothing does
    if not (math.isfinite(number) and (number > 0 or counted and number == 0)):
        raise ValueError(f"denominator must be finite and positive, got {number}")
    return number


def scale_of(
    scale: float | Tensor | torch.amp.GradScaler | None, devices: Sequence[torch.device]
) -> float | Tensor:
    """Return the factor for gradients; ``GradScaler.scale`` computes it, and marks it as used.

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


class LossWatch(Protocol):
    """Looks at the loss of a step's last micro-batch, see ``loss_checks``."""

    def look(
        self, function: LossFunction, loss: Tensor, output: Value, target: Value
    ) -> None:
        """Look at the loss, on the worker, without gradients."""

    def check(self) -> None:
        """Warn of what was seen, in the caller."""


@dataclass(eq=False)
class Loss:
    """The loss of a mini-batch: how each micro-batch's is computed, and how much it counts."""

    _function: LossFunction
    targets: Sequence[Value]
    """The target of each micro-batch."""
    _shares: Sequence[float]
    """The weight of each micro-batch's loss in the sum."""
    _scale: float | Tensor
    """The factor for gradients."""
    _denominator: float | Tensor | None = None
    """What the sum of all losses is divided by, if it is."""
    sizes: Sequence[int] = ()
    """The number of rows of each micro-batch; empty if they came ready."""
    is_differentiable: bool = False
    """Whether the loss of any micro-batch requires grad."""
    watch: LossWatch | None = None
    """Looks at the last micro-batch's loss, in steps that are checked."""

    draws: bool = field(init=False)
    """Whether the function draws random numbers, or might."""

    def __post_init__(self) -> None:
        is_own = self._function in (_returned, own_loss)
        self.draws = not (is_own or _is_functional(self._function))

    @property
    def is_returned(self) -> bool:
        """Whether the step's own function returns the loss, maybe with an output."""
        return self._function is _returned

    @property
    def _name(self) -> str:
        return "step" if self.is_returned else "loss_fn"

    def compute(self, i: int, place: Place, seed: RunSeed, output: Value, target: Value) -> Tensor:
        """Compute the loss of micro-batch ``i``.

        An error gets a note that says so. Random numbers are those of the loss at this ``place``,
        the last partition's, in a run with this ``seed``.

        Raises:
            TypeError: the function did not return a real tensor of one element.
        """
        try:
            if not self.draws:
                return self._computed(i, output, target)
            kind = f"loss {id(self._function)}"  # callers at once may have others
            with TaskRng(seed, Action(kind, i, place.j), place.device):
                return self._computed(i, output, target)
        except BaseException as error:
            if not self.is_returned:
                add_note(error, partial(_note, i, place, output, target))
            raise

    def _computed(self, i: int, output: Value, target: Value) -> Tensor:
        loss: Any = self._function(output, target)
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
                f"{self._name} must return a tensor of one element, got {describe(loss)}; {remedy}"
            )
        if loss.is_complex():
            raise TypeError(f"{self._name} must return a real number, got {describe(loss)}")
        self.is_differentiable |= loss.requires_grad
        if i == len(self.targets) - 1 and self.watch is not None:
            with torch.no_grad():
                self.watch.look(self._function, loss.detach(), output, target)
        return loss

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
