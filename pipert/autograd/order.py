"""Fork and Join: order in the backward graph that is not there in the data (section 3.2.2).

The micro-batches of one partition share no tensor, so autograd would run their backward in any
order. ``Fork`` takes a *token*, the paper's empty tensor, out of the values of ``F[i,j]``, and
``Join`` ties it into the values of ``F[i+1,j]``::

    token, y = fork(None, y)    # at the end of F[i,j]
    (x,) = join(token, x)       # at the start of F[i+1,j]

In the backward, ``Join'`` of ``B[i+1,j]`` comes last, and ``Fork'`` of ``B[i,j]``, which comes
first, has to wait for it. Both take all differentiable tensors of a value at once: ``B[i,j]`` is
over when *all* its gradients are there.

Where no input is differentiable, as usual in the first partition, there is nothing to join to, and
making an input differentiable would compute a gradient that nobody asked for. There the fork takes
the previous token itself. ``Fork'`` of ``i+1`` then releases ``Fork'`` of ``i`` before ``B[i+1,j]``
is over, but the engine still runs ``B[i+1,j]`` first: among ready nodes it takes the one made last,
and the nodes of ``F[i+1,j]`` were made after the fork of ``i`` by the same thread
(``test_backward_runs_in_reverse_order_without_differentiable_input``).

Outputs are detached tensors rather than the inputs as they are: torch forbids in-place operations
on those, and the next layer may well be one.
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
    def forward(ctx: Any, token: Tensor | None, *ys: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        return (_EMPTY.detach(), *map(Tensor.detach, ys))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


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
"""The leaf behind all that has entered. It never gets a gradient."""


def enter(xs: Tensors) -> Tensors:
    """``xs`` as results of an operation, which may be changed in place.

    The graph begins here, and does not keep ``xs``, as it would if they were its leaves: what no
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
"""``token, *ys = fork(token, *ys)``: take a token out of ``ys``, differentiable all. A token that
was not joined before goes in; ``None`` for none."""

join = applied(_Join)
"""``xs = join(token, *xs)``: tie ``token`` into ``xs``, differentiable all."""

_apply_enter, _apply_anchor = applied(_Enter), applied(_Anchor)


def edge_of(x: Tensor) -> GradientEdge:
    """The place of ``x`` in its graph, which stays alive without ``x``.

    ``get_gradient_edge`` makes a view to keep the graph, which sparse tensors do not have.
    """
    if x.layout == torch.strided:
        return get_gradient_edge(x)
    anchor: Any = _apply_anchor(x)
    ((node, output),) = anchor.grad_fn.next_functions
    return GradientEdge(node, output, anchor)  # the tensor: a node in Python keeps no graph
