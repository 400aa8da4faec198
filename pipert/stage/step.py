"""Holds what the stages of a step share, and ends it: outputs, the loss, gradients delivered.

The *ledger* remembers where gradients go in a step, whose graph is cut between partitions.

A tensor *crosses* where a later partition uses it: it enters that partition with the same values
and a graph of its own. The ledger has both edges of each crossing: the one at which the tensor left
the graph of the partition that has made it, and the one at which it entered the other. ``B`` of the
partition that it entered notes its gradient, with which ``B`` of the other begins::

    F[i,j]     y ----left            B[i,j]     begins at ``left`` with the gradient
                      | crossing                    ^
    F[i,k]           entered----z    B[i,k]     notes the gradient at ``entered``

All ``F`` of a micro-batch run one after the other, and so do all ``B``, which come later. So nobody
else uses what a task finds here, and each list is in a fixed order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import next_hook
from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.leaves import Reachable, find_leaves
from pipert.batch.joining import gather
from pipert.batch.tensors import differentiable
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.recompute.segment import Segments
from pipert.stage.gradients import Arriving, Gradients, delivery
from pipert.stage.loss import Loss


def detached(value: Value) -> Value:
    """Return ``value`` without its graph."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([tensor.detach() for tensor in tensors])) if tensors else value


@dataclass(slots=True, eq=False)
class Crossing:
    """A tensor of an earlier partition, or an input, that partition ``j`` uses."""

    j: int
    left: GradientEdge | None
    """Its place in the graph of the partition that made it; ``None`` for an input."""
    entered: GradientEdge
    """Its place in the graph of partition ``j``."""
    gradient: Tensor | None = None
    """What ``B[i,j]`` has found, on the device of partition ``j``."""


@dataclass(slots=True, eq=False)
class PartitionGraph:
    """What ``B[i,j]`` needs from ``F[i,j]``."""

    entered: list[Crossing] = field(default_factory=list)
    """The tensors that entered the partition."""
    left: list[Crossing] = field(default_factory=list)
    """The tensors made in the partition that later ones use."""
    loss: Tensor | None = None
    """The loss, in the last partition."""
    segments: Segments | None = None
    """What ``R[i,j]`` repeats, if the micro-batch is checkpointed."""
    find_reachable: Callable[[list[Node]], Reachable] | None = None
    """Returns what is behind the ends of the graph; by default the stage's nodes are its own."""
    made: int = 0
    """The number of nodes that the ``F[i,j]`` of any model has made."""


@dataclass
class Step:
    """One step on its way. Each stage writes its own entries; the caller reads after the run."""

    loss: Loss
    keep_outputs: bool = False
    extra_parameters: Callable[[], Iterable[Tensor]] = tuple
    """Returns parameters of no partition: those of the model's own code and of the loss."""
    ledger: dict[tuple[int, int], PartitionGraph] = field(
        default_factory=lambda: defaultdict(PartitionGraph)
    )
    """The graphs from ``F`` until ``B``, by micro-batch and partition."""
    first_hook: int = field(default_factory=next_hook)
    """Hooks registered in the step have numbers from this on."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """What each micro-batch adds to the loss of the mini-batch, or to its sum."""
    outputs: dict[int, Value] = field(default_factory=dict)
    output: Value = None
    """The output of the mini-batch, once it is gathered; a list if micro-batches came ready."""
    inputs: list[Tensors] = field(default_factory=list)
    """For each micro-batch, the differentiable tensors of its input, in the caller's graph."""
    input_gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)

    def cross(
        self, i: int, j: int, origin: int | None, tensors: Tensors, values: Tensors
    ) -> Tensors:
        """Return tensors with these ``values`` that begin a graph in partition ``j``.

        They take the places of ``tensors``, which partition ``origin`` has made, or the caller.
        """
        entered = order.enter(values)
        for tensor, begun in zip(tensors, entered, strict=True):
            left = None if origin is None else order.edge_of(tensor)
            crossing = Crossing(j, left, order.edge_of(begun))
            self.ledger[i, j].entered.append(crossing)
            if origin is not None:
                self.ledger[i, origin].left.append(crossing)
        return entered

    def compute_loss(
        self, i: int, place: Place, seed: RunSeed, y: Value, target: Value
    ) -> Tensor:
        """Compute the unscaled loss of micro-batch ``i``; note its share of the mini-batch's."""
        output = y
        if isinstance(y, tuple) and len(y) == 2 and self.loss.is_returned:
            y, output = y
        loss = self.loss.compute(i, place, seed, y, target)
        if self.keep_outputs:
            self.outputs[i] = detached(output)
        self.losses[i] = self.loss.share_of(i, loss.detach())
        return loss

    def check(self) -> None:
        """Gather the outputs, and refuse a loss without gradients, before any is delivered.

        Raises:
            ValueError: the outputs cannot be put together.
            RuntimeError: the loss does not require grad.
        """
        if not self.loss.is_differentiable:
            raise RuntimeError(
                "the loss does not require grad, so there is nothing to go backward through: no "
                "parameter of the model requires grad, or loss_fn detaches"
            )
        if self.loss.watch is not None:
            self.loss.watch.check()
        if self.keep_outputs:
            outputs = [self.outputs.pop(i) for i in sorted(self.outputs)]
            self.output = gather(outputs, self.loss.sizes) if self.loss.sizes else outputs

    def drop(self) -> None:
        """Drop everything, since nobody waits for it; a task may still be executing."""
        self.inputs.clear()
        for kept in (self.losses, self.outputs, self.input_gradients, self.ledger):
            kept.clear()

    def commit(self, sums: Sequence[Gradients]) -> Tensor:
        """Deliver all gradients: to ``.grad``, and those of inputs to the caller's graph.

        Returns:
            The loss of the mini-batch, without a graph.
        """
        loss = self.total()
        for_inputs: Arriving = []
        # A weight that several partitions use occurs several times: autograd adds, also sparse to
        # dense.
        for_weights = [pair for partition_sums in sums for pair in partition_sums.take()]
        for i, xs in enumerate(self.inputs):
            pairs = zip(xs, self.input_gradients.pop(i, ()), strict=False)
            for_inputs += [(x, dx.to(x.device, copy=True)) for x, dx in pairs if dx is not None]
        self.inputs = []
        turns = _in_turn(for_inputs, for_weights)
        del for_inputs, for_weights  # a gradient that nobody else holds need not be copied
        for end in [delivery(arriving) for arriving in turns if arriving]:
            torch.autograd.backward(end)
        return loss

    def total(self) -> Tensor:
        """Return the loss of the mini-batch."""
        losses = [self.losses[i].reshape(()) for i in sorted(self.losses)]
        return self.loss.of_mini_batch(torch.stack(losses))


def _in_turn(for_inputs: Arriving, for_weights: Arriving) -> tuple[Arriving, Arriving]:
    """Split gradients into two turns: first all that pass through the caller's graph or end in it.

    That graph may fail, and then no other weight has a gradient of the failed step. And a hook on a
    weight that the caller's graph uses, too, is called once.
    """
    roots = [tensor for tensor, _ in (*for_inputs, *for_weights) if tensor.grad_fn is not None]
    if not for_inputs and not roots:
        return [], for_weights
    ends = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    reached = {id(tensor) for tensor in (*roots, *find_leaves(ends).leaves)}
    reached.update(id(tensor) for tensor, _ in for_inputs)
    first = [pair for pair in for_weights if id(pair[0]) in reached]
    return [*for_inputs, *first], [pair for pair in for_weights if id(pair[0]) not in reached]
