"""What the stages of a step share, and how it ends: outputs, the loss, gradients delivered."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.autograd.leaves import leaves_behind
from pipert.batch.joining import gather
from pipert.stage.gradients import (
    Arriving,
    Gradients,
    delivery,
    gathered,
    give,
    scaled,
    split_off,
)
from pipert.stage.loss import Loss

__all__: list[str] = []


def without_grad() -> RuntimeError:
    """Say that a loss has no gradients."""
    return RuntimeError(
        "the loss does not require grad, so there is nothing to go backward through: no parameter "
        "of the model requires grad, or loss_fn detaches"
    )


@dataclass
class Step:
    """One step going through. Stages write what they own; the caller reads when all is over."""

    loss: Loss
    keep_outputs: bool = False
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Of each micro-batch what it adds to that of the mini-batch, or to its sum."""
    outputs: dict[int, Value] = field(default_factory=dict)
    output: Value = None
    """Of the mini-batch, when it was gathered."""
    inputs: list[Tensors] = field(default_factory=list)
    """Of each micro-batch the tensors that want a gradient, in the caller's graph."""
    input_gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)

    def check(self) -> None:
        """Put the outputs together, and refuse a loss without gradients, before any arrives.

        Raises:
            ValueError: the outputs cannot be put together.
            RuntimeError: the loss does not require grad.
            RuntimeWarning: the losses of some micro-batches are not finite; where warnings are
                errors.
        """
        if not self.loss.is_differentiable:
            raise without_grad()
        self._warn_of_some()
        if self.keep_outputs:
            outputs = [self.outputs.pop(i) for i in sorted(self.outputs)]
            self.output = gather(outputs, self.loss.sizes)

    def drop(self) -> None:
        """Keep nothing: nobody waits for it any more, though a task may be executing."""
        self.inputs.clear()
        for kept in (self.losses, self.outputs, self.input_gradients):
            kept.clear()

    def commit(self, sums: Sequence[Gradients]) -> Tensor:
        """Let all gradients arrive: in ``.grad``, and those of inputs in the caller's graph.

        Returns:
            The loss of the mini-batch, without a graph.
        """
        loss = self.loss.of_mini_batch(self._losses())
        self._correct(sums)
        of_inputs: Arriving = []
        of_weights = gathered(sums)
        for i, xs in enumerate(self.inputs):
            given = zip(xs, self.input_gradients.pop(i, ()), strict=False)
            of_inputs += [(x, dx.to(x.device)) for x, dx in given if dx is not None]
        self.inputs = []
        turns = _in_turn(of_inputs, of_weights)
        del of_inputs, of_weights  # what nobody else has need not be copied
        unheard = split_off(turns[1])
        for end in [delivery(arriving) for arriving in turns if arriving]:
            torch.autograd.backward(end)
        if left := give(unheard):
            torch.autograd.backward(delivery(left))
        return loss

    def _losses(self) -> Tensor:
        return torch.stack([self.losses[i].reshape(()) for i in sorted(self.losses)])

    def _warn_of_some(self) -> None:
        """Warn if the losses of some micro-batches are not finite, and those of others are.

        Not on a GPU: one would have to wait for it.
        """
        if any(loss.is_cuda for loss in self.losses.values()):
            return
        losses = self._losses()
        if bool(losses.sum().isfinite()):
            return
        finite = losses.isfinite()
        if bool(finite.any()):
            found = [i for i in range(len(losses)) if not finite[i]]
            named = ", ".join(f"{losses[i]} for micro-batch {i}" for i in found)
            warnings.warn(
                f"the loss is {named}, and finite for the other {len(losses) - len(found)}. A mean "
                "of nothing is nan, as of a micro-batch with only ignored targets: let loss_fn "
                "return a pair (sum, count), and the loss is the mean of what counts in the "
                "mini-batch",
                RuntimeWarning,
                stacklevel=5,
            )

    def _correct(self, sums: Sequence[Gradients]) -> None:
        """Divide gradients by the real count, where they were divided by an expected one."""
        correction = self.loss.counts.correction()
        if correction is None:
            return
        for of_partition in sums:
            of_partition.scale(correction)
        for i, dxs in self.input_gradients.items():
            corrected = [None if dx is None else scaled(dx, correction) for dx in dxs]
            self.input_gradients[i] = corrected


def _in_turn(of_inputs: Arriving, of_weights: Arriving) -> tuple[Arriving, Arriving]:
    """First all that goes through the caller's graph, which may fail, and ends in it.

    Then no other weight has a gradient of a step that failed; and who listens to one that the
    caller's graph uses as well, hears of it once.
    """
    roots = [tensor for tensor, _ in (*of_inputs, *of_weights) if tensor.grad_fn is not None]
    if not of_inputs and not roots:
        return [], of_weights
    ends = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    reached = {id(tensor) for tensor in (*roots, *leaves_behind(ends).leaves)}
    reached.update(id(tensor) for tensor, _ in of_inputs)
    first = [one for one in of_weights if id(one[0]) in reached]
    return [*of_inputs, *first], [one for one in of_weights if id(one[0]) not in reached]
