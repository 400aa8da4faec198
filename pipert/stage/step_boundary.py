"""Cuts the ends of a stage: in a step, each stage goes backward by itself.

The graph of a micro-batch ends at the borders of the stage. It is kept from ``F[i,j]`` to
``B[i,j]``; if the micro-batch is checkpointed, only from ``R[i,j]``, which builds it anew. How many
are kept at a time is up to the plan. On CPU each worker goes backward on its own thread, so stages
do it in parallel.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from pipert._torch import node_count
from pipert._typing import Value
from pipert.autograd.order import begin_numbers
from pipert.autograd.weight_gradients import DeferredGradients
from pipert.batch.tensors import differentiable
from pipert.batch.trees import CLOSED_TO_GRAPHS, ORDINARY, REMEDY, flatten, held_by
from pipert.layers.place import Place
from pipert.recompute.segment import Segments
from pipert.schedules.action import WEIGHT
from pipert.stage.copies import Copies
from pipert.stage.gradients import Gradients
from pipert.stage.run import Run
from pipert.stage.step import Step


class StepBoundary:
    """The ends of a stage whose graph is cut.

    Args:
        step: what the stages of the step share.
        run: the run that the stage belongs to.
        place: the stage's place. The last stage computes the loss.
        copies: brings values to the stage's device.
    """

    def __init__(self, step: Step, run: Run, place: Place, copies: Copies) -> None:
        self.step, self.copies = step, copies
        self._run, self._place, self._is_last = run, place, place.is_last
        self.gradients = Gradients()
        # Saved-tensor hooks of the caller would unpack twice what they have packed, and anomaly
        # detection looks at what the engine computes.
        is_watched = run.context.saved_tensor_hooks is not None or torch.is_anomaly_enabled()
        self.defers_weights = WEIGHT in run.plan.occurring_kinds and not is_watched
        """Whether ``B[i,j]`` leaves gradients of weights to ``W[i,j]``."""
        self.deferred: dict[int, list[DeferredGradients]] = {}
        """What ``W[i,j]`` computes, by micro-batch."""
        self.leaves: dict[Hashable, tuple[list[Tensor], bool]] = {}
        """The leaves of graphs that are alike, and whether those of the next need no search."""
        self._first: int | None = None  # nodes made here have numbers from this on

    def cross(self, i: int, x: Value, origin: int | None, is_skip: bool = False) -> Value:
        """Bring a value here from partition ``origin``, or the caller, and cut its graph."""
        if self._first is None:
            self._first = begin_numbers(self._run.first_node)
        xs, rebuild = differentiable(x)
        values = xs
        if self.copies.come_in:
            x = self.copies.bring(i, x, origin)
            values, rebuild = differentiable(x)
        if not xs:
            return x
        crossed: Value = rebuild(self.step.cross(i, self._place.j, origin, xs, values))
        return crossed

    def leave(self, i: int, y: Value, segments: Segments | None) -> Value:
        """Note what ``B[i,j]`` needs; return the output, whose graph is cut where it crosses."""
        self.copies.let_others_copy(i)
        ys, _ = differentiable(y)
        if ys:
            graph = self.step.ledger[i, self._place.j]
            graph.segments = segments
            if self._is_last:
                graph.loss = ys[0]
        if not self._is_last and not isinstance(y, Tensor):
            _refuse_hidden_graph(y)
        return y

    def compute_loss(self, i: int, y: Value) -> Value:
        """Compute the unscaled loss of micro-batch ``i``; note its share of the mini-batch's."""
        target = self.step.loss.targets[i]
        originals = differentiable(target)[0]
        target = self.copies.bring(i, leaf_inputs(target) if originals else target, None)
        if originals:
            self.gradients.stand_ins.update(zip(differentiable(target)[0], originals, strict=True))
        return self.step.compute_loss(i, self._place, self._run.seed, y, target)

    def copy_weight(self, i: int, weight: Tensor) -> Tensor:
        """Copy a parameter that lives elsewhere.

        A model that asks for it in inference mode may use it again outside of that mode.
        """
        with torch.inference_mode(False):
            (leaf,) = self.copies.bring(i, (weight.detach(),), None)
            leaf.requires_grad_(weight.requires_grad)
        self.gradients.stand_ins[leaf] = weight
        return leaf  # type: ignore[no-any-return]

    def numbers(self) -> range:
        """Return the numbers of nodes made here, without any that a node of the caller may have."""
        return range(max(self._first or 0, self._run.first_node), node_count())

    def drop(self) -> None:
        self.deferred.clear()
        self.gradients.clear()
        self.step.drop()


def _refuse_hidden_graph(y: Value) -> None:
    """Refuse an object that would take a part of this graph to other stages, uncut."""
    leaves, _ = flatten(y)
    if ORDINARY.issuperset(map(type, leaves)):
        return
    for leaf in leaves:
        if any(map(_is_in_graph, held_by(leaf, CLOSED_TO_GRAPHS))):
            raise TypeError(
                f"a value for another partition has a {type(leaf).__qualname__} that holds a tensor"
                f" of its graph, which forward_backward cannot take apart; {REMEDY}, return None "
                "for it, or call the pipe and loss.backward()"
            )


def _is_in_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def leaf_inputs(value: Value) -> Value:
    """Return ``value`` with fresh leaves for differentiable tensors, as the first stage gets it."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([t.detach().requires_grad_() for t in tensors])) if tensors else value
