"""Checkpoint and Recompute: the paper's pair with shared memory (section 3.2.4).

The standard checkpoint is one autograd function that runs the forward without grad and, in its
backward, runs it again and differentiates the result. That ties recomputation to back-propagation,
but the pipeline needs ``R[i,j]`` to run while ``dy`` is in transit, and ``B[i,j]`` afterwards. So
the paper splits the function into two that share memory, a :class:`.Segment`::

    xs, weights -> Checkpoint -> Wait -> Recompute -> Fork      and backward from right to left

*Recompute* computes the segments of a partition again and leaves a graph in each, *Checkpoint*
differentiates that graph:

1. *Checkpoint* is a function of everything the graph of a segment begins with: the inputs, and the
   leaves that a walk of the graph finds. So hooks on parameters, ``autograd.grad``, frozen layers
   and ``DistributedDataParallel`` see what they see without checkpointing: one gradient per
   micro-batch, which autograd sums.
2. Gradients have no graph: under ``create_graph`` *Checkpoint* refuses to go back.
3. *Checkpoint* releases the inputs and the graph when its backward is over, unless the backward
   retains the graph. In that case the next backward recomputes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipert._torch import COMPILED_KEY, keeps_graph, will_execute
from pipert._typing import Tensors
from pipert.autograd.engine import applied
from pipert.errors import TransformError


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, segment: Any, ys: Tensors, xs: Tensors, *begins: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.segment = segment
        ctx.leaves = begins[len(xs) :]
        return tuple([*map(Tensor.detach, ys)])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.segment is None:
            raise RuntimeError(_SECOND_TIME)
        if all(dy is None for dy in dys):
            return (None,) * len(ctx.needs_input_grad)
        found = ctx.segment.differentiate(dys, ctx)
        if not keeps_graph():
            ctx.segment = ctx.leaves = None
        return (None, None, None, *found)


class _CheckpointOfFunctions(_Checkpoint):
    """A *Checkpoint* of functions written in Python, whose backward may call the engine."""


def are_needed(edges: Iterable[tuple[Any, int]]) -> list[bool]:
    """Whether the current backward asks for the gradients that go to these nodes."""
    needed = []
    for node, _ in edges:
        try:
            needed.append(will_execute(node))
        except RuntimeError:  # torch does not answer for a leaf that autograd.grad asks for
            needed.append(True)
    return needed


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segments: weakref.ref[Any], *ys: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.segments = segments
        return tuple([*map(Tensor.detach, ys)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        segments = ctx.segments()
        if segments is not None and any(grad is not None for grad in grads):
            segments.recompute_missing()
        return (None, *grads)


def refuse_compiled_autograd(_: object = None) -> NoReturn:
    """Refuse compiled autograd, which would trace the recomputation inside of the backward."""
    raise TransformError(
        "compiled autograd captures one backward at a time, and no recomputation: leave it out, or "
        "call the pipe, with checkpoint='never', and loss.backward()"
    )


for _function in (_Checkpoint, _Recompute):
    setattr(_function, COMPILED_KEY, staticmethod(refuse_compiled_autograd))
_apply_checkpoint, _apply_around_functions = applied(_Checkpoint), applied(_CheckpointOfFunctions)
_apply_recompute = applied(_Recompute)

_SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Specify retain_graph=True if you need to backward through the "
    "graph a second time"
)


def through_checkpoint(
    segment: Any, ys: Tensors, xs: Tensors, leaves: Sequence[Tensor], has_functions: bool
) -> Tensors:
    """Return ``ys`` as functions of a segment's inputs and leaves by one node, *Checkpoint*."""
    apply = _apply_around_functions if has_functions else _apply_checkpoint
    outputs: Tensors = apply(segment, ys, xs, *xs, *leaves)
    return outputs


def recompute_before(ys: Tensors, segments: Any) -> Tensors:
    """Make the backward of ``ys``, which are all differentiable, recompute ``Segments`` first."""
    outputs: Tensors = _apply_recompute(weakref.ref(segments), *ys)
    return outputs
