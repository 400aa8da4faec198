"""Hooks that a layer puts on its argument, which are to see the whole gradient, and once.

What a layer gets may stand for a tensor of an earlier partition. The gradient of that is a part of
the tensor's, which others use as well. ``register_hook`` adds to a dict of its tensor, which
autograd calls. So what stands for a tensor gets a dict that autograd does not know, one for all
that stand for the same tensor, and the dict is tied to the tensor's own node later: in a step
before that one goes backward, and in a call when the partition ends.

A layer that is computed again puts its hooks on again. Those of the first time are called.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipert._typing import Tensors
from pipert.autograd import order
from pipert.autograd.leaves import AccumulateGrad

__all__: list[str] = []

Hook = Callable[[Tensor], Tensor | None]


class GradientHooks(OrderedDict[int, Hook]):
    """The hooks of what stands for one tensor, by the numbers of their handles.

    Args:
        of: the tensor.
    """

    def __init__(self, of: Tensor) -> None:
        super().__init__()
        self.edge: GradientEdge | None = order.edge_of(of)
        """Where the tensor is in the graph; ``None`` when they are tied."""
        self._of = weakref.ref(of)
        self._stand_ins: list[weakref.ref[Tensor]] = []

    def give(self, stand_in: Tensor) -> None:
        """Let the hooks of ``stand_in`` be these."""
        stand_in._backward_hooks = self
        self._stand_ins.append(weakref.ref(stand_in))

    def tie(self) -> None:
        """Let them be called with the tensor's gradient, if there are any. Again: no-op."""
        edge = self.edge
        if edge is None:
            return
        self._retain()
        if not self:
            return
        self.edge = None
        node: Any = edge.node
        if type(node) is AccumulateGrad:
            node.variable.register_hook(self._call)
            return
        *_, one = order.enter((torch.empty(0, device="cpu"),) * (edge.output_nr + 1))
        one._backward_hooks = self  # the node takes the dict and the number from it
        node._register_hook_dict(one)

    def _retain(self) -> None:
        """Where one retains its gradient, let all have the whole of it, as they are one tensor."""
        of, each = self._of(), [weak() for weak in self._stand_ins]
        unchanged = [one for one in each if one is not None and _hooks_of(one) is self]
        if any(one.retains_grad for one in unchanged):
            for one in unchanged:
                copy_gradient(one, one)
            if of is not None:
                of.retain_grad()

    def _call(self, gradient: Tensor) -> Tensor:
        for hook in list(self.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient


def hooks_for(tensor: Tensor) -> GradientHooks:
    """The hooks of what is about to stand for a tensor, or of what that one stands for already."""
    hooks = _hooks_of(tensor)
    return hooks if isinstance(hooks, GradientHooks) else GradientHooks(tensor)


def begin_again(
    begin: Callable[[Tensors], Tensors] | None,
    retaining: Iterable[tuple[int, Tensor]],
    tensors: Tensors,
) -> Tensors:
    """Begin the graph of a layer that is computed again, whose hooks are those of the first time.

    Args:
        begin: begins it; ``None``: with leaves.
        retaining: the tensors that the layer got the first time and whose gradients it retains,
            by the numbers of those that it gets now.
        tensors: what it is to get.
    """
    begun = tuple([x.requires_grad_() for x in tensors]) if begin is None else begin(tensors)
    for tensor in begun:
        tensor._backward_hooks = OrderedDict()  # nobody calls those
    for number, tensor in retaining:
        copy_gradient(tensor, begun[number])
    return begun


def _hooks_of(tensor: Tensor) -> Any:
    return tensor._backward_hooks


def copy_gradient(of: Tensor, to: Tensor) -> None:
    """Let a tensor have the gradient of another one as its own, when that is computed.

    After all hooks, also those that are put on later: a layer may be computed again before a
    later partition has run. What never runs, as where a graph begins, has no place for that.
    """
    hooks = _hooks_of(of)
    edge = hooks.edge if isinstance(hooks, GradientHooks) else order.edge_of(of)
    if edge is None or type(edge.node) in _NEVER_RUN:
        of.register_hook(partial(_set_gradient, weakref.ref(to)))  # type: ignore[no-untyped-call]
    else:
        edge.node.register_prehook(partial(_set_one, weakref.ref(to), edge.output_nr))


_NEVER_RUN = frozenset({AccumulateGrad, order.ENTERED})


def _set_one(weak: weakref.ref[Tensor], number: int, gradients: Tensors) -> None:
    if gradients[number] is not None:
        _set_gradient(weak, gradients[number])


def _set_gradient(weak: weakref.ref[Tensor], gradient: Tensor) -> None:
    tensor = weak()
    if tensor is not None:
        tensor.grad = gradient.detach().to(tensor.device, copy=True)
