"""Cut ends: a step, in which a stage goes backward by itself.

The graph of a micro-batch ends at the borders of the stage. It is kept from ``F[i,j]`` to
``B[i,j]``: how many are is up to the plan. On CPU each worker goes backward on its own thread, so
stages do so at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipert._typing import Tensors, Value
from pipert.autograd import order, streams
from pipert.autograd.checkpoint import Checkpoint
from pipert.batch.tensors import differentiable
from pipert.layers.place import Place
from pipert.layers.random_numbers import RunSeed
from pipert.layers.tied import Weights
from pipert.skip.routes import Carried
from pipert.stage.copies import Copies
from pipert.stage.gradients import Gradients
from pipert.stage.step import Step

__all__: list[str] = []

Edges = tuple[GradientEdge, ...]


class Kept(NamedTuple):
    """What ``B[i,j]`` needs of ``F[i,j]``: places in its graph, and no values, which may be large.

    What the backward reads of the inputs and outputs themselves, the graph has saved.
    """

    xs: Edges
    """The inputs that want a gradient, those of arriving skips behind those of the value."""
    arriving: tuple[int, ...]
    """How many of them each arriving skip has."""
    ys: Edges
    """The outputs that get a gradient, those of leaving skips behind those of the value."""
    leaving: tuple[int, ...]
    """How many of them each leaving skip has."""
    loss: Tensor | None
    """Of the last stage, which has no other output."""
    checkpoint: Checkpoint | None


class Entered(NamedTuple):
    """The inputs of the micro-batch that is at work."""

    xs: Edges
    arriving: tuple[int, ...]


class Cut:
    """The ends of a stage whose graph is cut.

    Args:
        step: what the stages of the step share.
        is_last: whether this one computes the loss.
        place: where it is.
        seed: of the run's random numbers.
        copies: brings values here.
    """

    __slots__ = (
        "_copies", "_entered", "_is_last", "_place", "_seed", "gradients", "kept", "stand_ins",
        "step",
    )  # fmt: skip

    def __init__(
        self, step: Step, is_last: bool, place: Place, seed: RunSeed, copies: Copies
    ) -> None:
        self.step = step
        self.gradients = Gradients()
        self.kept: dict[int, Kept] = {}
        self.stand_ins: dict[Tensor, Tensor] = {}  # to what each leaf in here stands for
        self._is_last = is_last
        self._place = place
        self._seed = seed
        self._copies = copies
        self._entered = Entered((), ())

    def enter(self, i: int, x: Value) -> Value:
        copied = None
        if self._copies.come_in:
            x, copied = self._copies.bring_input(i, x)
        if copied is not None:
            compute = streams.compute_stream(self._place.device)
            self._copies.transport.wait(i, x, compute, copied)
        skips = x.skips if isinstance(x, Carried) else ()
        arriving = tuple([len(differentiable(skip)[0]) for skip in skips])
        xs, rebuild = differentiable(x)
        if not xs:
            self._entered = Entered((), arriving)
            return x
        xs = order.enter(xs)
        self._entered = Entered(edges_of(xs), arriving)
        return rebuild(xs)

    def leave(self, i: int, y: Value, checkpoint: Checkpoint | None) -> Value:
        (xs, arriving), self._entered = self._entered, Entered((), ())
        self._copies.let_others_copy(i)
        ys, rebuild = differentiable(y)
        skips = y.skips if isinstance(y, Carried) else ()
        leaving = tuple([len(differentiable(skip)[0]) for skip in skips])
        if ys:
            loss = ys[0] if self._is_last else None
            self.kept[i] = Kept(xs, arriving, edges_of(ys), leaving, loss, checkpoint)
        if self._is_last:
            return Carried((), ()) if isinstance(y, Carried) else ()
        return rebuild(tuple([tensor.detach().requires_grad_() for tensor in ys]))

    def compute_loss(self, i: int, y: Value) -> Value:
        """Compute the loss of micro-batch ``i``, unscaled; note its share of the whole."""
        skips = y.skips if isinstance(y, Carried) else None
        if isinstance(y, Carried):
            y = y.value
        loss, device = self.step.loss, self._place.device
        target, copied = self._copies.bring(i, leaf_inputs(loss.targets[i]), None)
        if copied is not None:
            compute = streams.compute_stream(device)
            self._copies.transport.wait(i, target, compute, copied)
        wanting = differentiable(loss.targets[i])[0]
        self.stand_ins.update(zip(differentiable(target)[0], wanting, strict=True))
        own = loss.compute(self._place.number_of_loss(i), self._seed, device, y, target)
        if self.step.keep_outputs:
            self.step.outputs[i] = detached(y)
        self.step.losses[i] = own.detach() * loss.shares[i]
        return own if skips is None else Carried(own, skips)

    def borrow(self, i: int, weights: Weights) -> Sequence[Tensor]:
        """Copy parameters that live elsewhere; make stand-ins for those that have hooks.

        Autograd calls the hooks of a tensor whenever it comes by with a part of its gradient. They
        are to see the whole, once, so that part is the stand-in's.
        """
        leaves = []
        for weight in weights:
            (copy,), copied = self._copies.bring(i, (weight.detach(),), None)
            if copied is not None:
                streams.wait(streams.compute_stream(self._place.device), copied)
            leaves.append(copy.requires_grad_(weight.requires_grad))
        self.stand_ins.update(zip(leaves, weights, strict=True))
        return leaves

    def bring_gradients(
        self, i: int, gradients: Sequence[Tensor | None], origin: int
    ) -> list[Tensor | None]:
        """Bring gradients here from partition ``origin``."""
        there = tuple([gradient for gradient in gradients if gradient is not None])
        moved, copied = self._copies.bring(i, there, origin)
        if copied is not None:
            compute = streams.compute_stream(self._place.device)
            self._copies.transport.wait(i, moved, compute, copied)
        here = iter(moved)
        return [None if gradient is None else next(here) for gradient in gradients]

    def let_others_copy(self, i: int) -> None:
        """Let others copy the gradients that are there now."""
        self._copies.let_others_copy(i)

    def drop(self) -> None:
        self.kept.clear()
        self.gradients.clear()
        self.step.drop()


def edges_of(tensors: Tensors) -> Edges:
    """Where they are in the graph, which stays alive without them."""
    return tuple([order.edge_of(tensor) for tensor in tensors])


def leaf_inputs(value: Value) -> Value:
    """The same with leaves for the tensors that want a gradient, as the first stage gets it."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([t.detach().requires_grad_() for t in tensors])) if tensors else value


def detached(value: Value) -> Value:
    """The same without its graph."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([tensor.detach() for tensor in tensors])) if tensors else value
