"""Fork and Join: impose an order on the backward that the data does not imply (section 3.2.2).

The micro-batches of one partition share no tensor, so autograd may run their backward in any
order. ``Fork`` takes a *token*, the paper's empty tensor, out of the values of ``F[i,j]``, and
``Join`` ties it into the values of ``F[i+1,j]``::

    token, y = fork(i, None, y)    # at the end of F[i,j]
    (x,) = join(token, x)       # at the start of F[i+1,j]

In the backward, ``Join'`` is the end of ``B[i+1,j]``, and ``Fork'``, the start of ``B[i,j]``,
waits for it. Both take all differentiable tensors of a value at once: ``B[i,j]`` is over when *all*
its gradients have arrived.

Where no input is differentiable, as is usual in the first partition, there is nothing to join to,
and making an input differentiable would compute an unneeded gradient. There the fork takes
the previous token itself. ``Fork'`` of ``i+1`` then releases ``Fork'`` of ``i`` before ``B[i+1,j]``
is over, but the engine still runs ``B[i+1,j]`` first: among ready nodes it picks the one created
last, and the same thread created the nodes of ``F[i+1,j]`` after the fork of ``i``
(``test_backward_runs_in_reverse_order_without_differentiable_input``).

The engine sums gradients, such as those of a weight that several partitions use, in the order in
which nodes run. Among ready nodes it runs the one with the highest sequence number, and each thread
numbers its own nodes: the order of two workers' nodes would depend on everything they have ever
done. Where one thread runs the backward of all partitions, a task therefore takes its *turn* at its
fork: the fork's number is that of the micro-batch, lower than those of all nodes but forks. So a
task that has begun ends before the next one begins, the caller's operations on the outputs run
before the first task, and of two tasks that could begin, that of the later micro-batch does.

Outputs are detached tensors rather than the inputs themselves: torch forbids in-place operations
on inputs that a function returns, and the next layer may work in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipert._torch import WithoutFunctions, make_node, node_count, set_sequence_nr
from pipert._typing import Tensors
from pipert.autograd.engine import applied

_EMPTY = torch.empty(0, device="cpu")


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, turn: int | None, token: Tensor | None, *ys: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        if turn is not None:
            set_sequence_nr(ctx, turn)
        return (_EMPTY.detach(), *map(Tensor.detach, ys))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *grads)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        return tuple([*map(Tensor.detach, xs)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        return tuple([*map(Tensor.detach, xs)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        # The gradients of edges do not come here, so this is not the backward of a task.
        if any(grad is not None for grad in grads):
            raise RuntimeError(_REACHES_INPUTS)
        return (None,) * (1 + len(grads))


_REACHES_INPUTS = (
    "a backward() in a layer or in loss_fn, or from what a recomputation has stored, goes back to "
    "the inputs of its partition and cannot go further, so gradients of earlier layers would be "
    "lost. Add what it starts from to the loss, or detach the inputs; with checkpoint='never' a "
    "call of the pipe and loss.backward() allow it"
)

ENTRANCE = torch.empty(0, device="cpu", requires_grad=True)
"""The leaf that all graphs begun by :func:`enter` lead to. It never gets a gradient."""

_held = ENTRANCE.view_as(ENTRANCE)
"""Keeps the leaf's ``AccumulateGrad`` alive, since functions are applied to the leaf on several
threads, which could deadlock (see ``autograd.leaves``). Under anomaly detection, creating the node
takes the interpreter's lock."""


def enter(xs: Tensors) -> Tensors:
    """Begins a graph: returns ``xs`` as results of an operation, which may be changed in place.

    The graph does not keep ``xs`` alive, as it would its leaves: a tensor that no operation saves
    is dropped. Get gradients for the edges that :func:`edge_of` returns.
    """
    entered: Tensors = _apply_enter(ENTRANCE, *map(Tensor.detach, xs))
    return entered


def begin_numbers(after: int) -> int:
    """Advances the current thread's sequence numbers to ``after``; returns the next node's number.

    That takes 0.1 s for a million nodes, once in the life of a thread. Under anomaly detection each
    records a stack, so a thread gets closer with each call.
    """
    behind = after - node_count()
    for _ in range(min(behind, 1_000) if torch.is_anomaly_enabled() else behind):
        make_node()
    return node_count()


fork = applied(_Fork)
"""``token, *ys = fork(turn, token, *ys)``: takes a token out of ``ys``, which are all
differentiable. A previous token that was not joined goes in, or ``None``. The turn is the number of
the micro-batch, or ``None``."""

join = applied(_Join)
"""``xs = join(token, *xs)``: ties ``token`` into ``xs``, which are all differentiable."""

_apply_enter = applied(_Enter)

ENTERED: Any = type(enter((_EMPTY,))[0].grad_fn)
"""The class of the nodes that :func:`enter` creates."""


def edge_of(x: Tensor) -> GradientEdge:
    """Returns the position of ``x`` in its graph, which keeps the graph alive without ``x``.

    ``get_gradient_edge`` keeps the graph alive by a view, which sparse tensors do not support, and
    finds the leaf behind one, to which the class of ``x`` might add a node.
    """
    with WithoutFunctions():
        return get_gradient_edge(x)
