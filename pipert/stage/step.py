"""What the lanes of a whole training step share: the loss, and where gradients end up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Tensors, Value
from pipert.batch.microbatch import as_value, gather, scatter_with_sizes
from pipert.batch.tensors import describe
from pipert.layers.random_numbers import RunSeed, call_layer, run_seeded
from pipert.schedules.plan import StepSchedule
from pipert.skip.namespace import Key
from pipert.stage.gradients import Gradients, delivery, gathered, leaves_behind

__all__: list[str] = []

Arriving = list[tuple[Tensor, Tensor]]
LossFunction = Callable[[Any, Any], Tensor]


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
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not callable(function):
        raise TypeError(f"loss_fn must be a function of output and target, got {function!r}")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError(
            "forward_backward computes gradients, which are disabled here; call it outside of "
            "torch.no_grad() and torch.inference_mode(), or call the pipe for outputs alone"
        )
    named = {**kwargs, _TARGET: target}
    split, sizes = scatter_with_sizes(args, named, chunks)
    inputs, targets = [], []
    for micro_batch in split:
        own = dict(micro_batch.kwargs)
        targets.append(own.pop(_TARGET))
        inputs.append(as_value(micro_batch.args, own))
    rows = sum(sizes)
    shares = [1.0 if reduction == "sum" or not rows else size / rows for size in sizes]
    return inputs, Loss(function, targets, shares, scale)


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
    if isinstance(scale, Tensor) and scale.numel() == 1:
        scale = scale.detach().reshape(())
        return scale.to(devices[0]) if scale.is_cuda and devices else scale
    if isinstance(scale, float | int):
        return scale
    raise TypeError(f"loss_scale must be a number or a GradScaler, got {describe(scale)}")


class Loss:
    """How the loss of each micro-batch is computed, and what it counts for.

    Args:
        function: gets an output and a target, returns a tensor of one element.
        targets: of each micro-batch.
        shares: of each micro-batch's loss in that of the mini-batch.
        scale: what gradients are multiplied by.
    """

    def __init__(
        self,
        function: LossFunction,
        targets: Sequence[Value],
        shares: Sequence[float],
        scale: float | Tensor,
    ) -> None:
        self.is_differentiable = False  # whether that of any micro-batch is
        self.targets = targets
        self.shares = shares
        self._scale = scale
        self._function = function
        layer = function if isinstance(function, nn.Module) else _Called(function)
        self._layer = None if _is_functional(function) else layer

    def compute(self, place: int, seed: RunSeed, device: torch.device, *args: Any) -> Tensor:
        """The loss of one micro-batch, with random numbers of its own.

        Raises:
            TypeError: the function did not return a tensor of one element.
        """
        if self._layer is None:
            loss: Any = self._function(*args)
        else:
            loss = run_seeded(seed, place, device, call_layer, self._layer, *args)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"loss_fn must return a tensor of one element, got {describe(loss)}; reduce it over"
                " the rows of the micro-batch"
            )
        if loss.is_complex():
            raise TypeError(f"loss_fn must return a real number, got {describe(loss)}")
        self.is_differentiable |= loss.requires_grad
        return loss

    def seed_of(self, i: int, loss: Tensor) -> Tensor:
        """Where the backward of micro-batch ``i`` begins."""
        return torch.ones_like(loss) * (self.shares[i] * self._scale)


class _Called(nn.Module):
    def __init__(self, function: LossFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, y: Any, target: Any) -> Tensor:
        return self.function(y, target)


def _is_functional(function: Any) -> bool:
    """Whether it is one of torch's loss functions, which draw no random numbers."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", "") == "torch.nn.functional"


@dataclass
class Step:
    """One step going through. Lanes write what they own; the caller reads when all is over."""

    schedule: StepSchedule
    loss: Loss
    keep_outputs: bool = False
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Of each micro-batch its share of the mini-batch's."""
    outputs: dict[int, Value] = field(default_factory=dict)
    output: Value = None
    """Of the mini-batch, when it was gathered."""
    inputs: list[Tensors] = field(default_factory=list)
    """Of each micro-batch the tensors that want a gradient, in the caller's graph."""
    input_gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)
    skip_gradients: dict[tuple[Key, int, int, int], Sequence[Tensor | None]] = field(
        default_factory=dict
    )
    """Of the skip ``key`` of micro-batch ``i`` that went from partition ``j`` to ``k``."""

    def check(self) -> None:
        """Put the outputs together, and refuse a loss without gradients, before any arrives.

        Raises:
            ValueError: the outputs cannot be put together.
            RuntimeError: the loss does not require grad.
        """
        if not self.loss.is_differentiable:
            raise RuntimeError(
                "the loss does not require grad, so there is nothing to go backward through: no "
                "parameter of the model requires grad, or loss_fn detaches"
            )
        if self.keep_outputs:
            self.output = gather([self.outputs.pop(i) for i in sorted(self.outputs)])

    def drop(self) -> None:
        """Keep nothing: nobody waits for it any more, though a task may be executing."""
        self.inputs.clear()
        for kept in (self.losses, self.outputs, self.input_gradients, self.skip_gradients):
            kept.clear()

    def commit(self, sums: Iterable[Gradients]) -> Tensor:
        """Let all gradients arrive: in ``.grad``, and those of inputs in the caller's graph.

        Returns:
            The loss of the mini-batch, without a graph.
        """
        loss = torch.stack([self.losses[i].reshape(()) for i in sorted(self.losses)]).sum()
        of_inputs: Arriving = []
        of_weights = gathered(sums)
        for i, xs in enumerate(self.inputs):
            given = zip(xs, self.input_gradients.pop(i, ()), strict=False)
            of_inputs += [(x, dx.to(x.device)) for x, dx in given if dx is not None]
        self.inputs = []
        turns = _in_turn(of_inputs, of_weights)
        del of_inputs, of_weights  # what nobody else has need not be copied
        for end in [delivery(arriving) for arriving in turns if arriving]:
            torch.autograd.backward(end)
        return loss


def _in_turn(of_inputs: Arriving, of_weights: Arriving) -> tuple[Arriving, Arriving]:
    """First all that goes through the caller's graph, which may fail, and ends in it.

    Then no other weight has a gradient of a step that failed; and who listens to one that the
    caller's graph uses as well, hears of it once.
    """
    roots = [tensor for tensor, _ in (*of_inputs, *of_weights) if tensor.grad_fn is not None]
    ends = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    reached = {id(tensor) for tensor in (*roots, *leaves_behind(ends))}
    reached.update(id(tensor) for tensor, _ in of_inputs)
    first = [one for one in of_weights if id(one[0]) in reached]
    return [*of_inputs, *first], [one for one in of_weights if id(one[0]) not in reached]
