"""Fork and Join: add an order to the backward graph that the data does not imply (section 3.2.2).

The micro-batches of one partition share no tensor, so autograd may run their backward in any
order. ``Fork`` takes a *token*, the paper's empty tensor, out of the values of ``F[i,j]``, and
``Join`` ties it into the values of ``F[i+1,j]``::

    token, y = fork(i, None, y)    # at the end of F[i,j]
    (x,) = join(token, x)       # at the start of F[i+1,j]

In the backward, ``Join'`` is the end of ``B[i+1,j]``, and ``Fork'``, the start of ``B[i,j]``,
waits for it. Both take all differentiable tensors of a value at once: ``B[i,j]`` is
over when *all* its gradients have arrived.

Where no input is differentiable, as is usual in the first partition, there is nothing to join to,
and making an input differentiable would compute an unneeded gradient. There the fork takes
the previous token itself. ``Fork'`` of ``i+1`` then releases ``Fork'`` of ``i`` before ``B[i+1,j]``
is over, but the engine still runs ``B[i+1,j]`` first: among ready nodes it picks the one created
last, and the same thread created the nodes of ``F[i+1,j]`` after the fork of ``i``
(``test_backward_runs_in_reverse_order_without_differentiable_input``).

What the backward adds up, such as the gradient of a weight that several partitions use, it adds in
the order in which nodes run. Of those that are ready it runs the one with the highest number, and
each thread counts its nodes up for itself: the order of two workers' nodes would depend on all that
they have ever done. Where one thread goes backward through all partitions, a task therefore takes
its *turn* at its fork, whose number is that of the micro-batch, and lower than those of all nodes
beside it. So what has begun ends before the next task begins, and what the caller has done with the
outputs comes before the first; of two tasks that could begin, that of the later micro-batch does.

Outputs are detached tensors rather than the inputs themselves: torch forbids in-place operations
on those, and the next layer may work in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipert._typing import Tensors
from pipert.autograd.function import applied

__all__: list[str] = []

_EMPTY = torch.empty(0, device="cpu")


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, turn: int | None, token: Tensor | None, *ys: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        if turn is not None:
            ctx._set_sequence_nr(turn)
        return (_EMPTY.detach(), *map(Tensor.detach, ys))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *grads)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        return tuple(map(Tensor.detach, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        return tuple(map(Tensor.detach, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        return (None,) * (1 + len(grads))


ENTRANCE = torch.empty(0, device="cpu", requires_grad=True)
"""The leaf behind everything that has entered. It never gets a gradient."""

_held = ENTRANCE.view_as(ENTRANCE)
"""Holds its ``AccumulateGrad``, since functions of ours are applied to it on several threads: the
deadlock of ``autograd.leaves``. In anomaly detection, to make one takes the interpreter's lock."""


def enter(xs: Tensors) -> Tensors:
    """Returns ``xs`` as results of an operation, which may be changed in place.

    The graph begins here but does not keep ``xs`` alive, as it would its leaves: what no
    operation saves is dropped. Ask for gradients by :func:`edge_of`.
    """
    entered: Tensors = _apply_enter(ENTRANCE, *map(Tensor.detach, xs))
    return entered


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        return _EMPTY.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        raise AssertionError("nobody goes backward from an anchor")


fork = applied(_Fork)
"""``token, *ys = fork(turn, token, *ys)``: take a token out of ``ys``, differentiable all. A token
that was not joined before goes in; ``None`` for none. The turn is the number of the micro-batch, or
``None``."""

join = applied(_Join)
"""``xs = join(token, *xs)``: tie ``token`` into ``xs``, differentiable all."""

_apply_enter, _apply_anchor = applied(_Enter), applied(_Anchor)

ENTERED: Any = type(enter((_EMPTY,))[0].grad_fn)
"""The kind of node behind what has entered."""


def edge_of(x: Tensor) -> GradientEdge:
    """Returns the position of ``x`` in its graph, and keeps the graph alive without ``x``.

    ``get_gradient_edge`` keeps the graph by a view, which sparse tensors do not support.
    """
    if x.layout == torch.strided:
        return get_gradient_edge(x)
    with torch.enable_grad():  # in a backward it is off
        anchor: Any = _apply_anchor(x)
    ((node, output),) = anchor.grad_fn.next_functions
    return GradientEdge(node, output, anchor)  # the tensor: a node in Python keeps no graph
