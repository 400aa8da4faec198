"""Makes hooks that a layer registers on its arguments see the whole gradient, once.

A layer may get a boundary tensor for a tensor of an earlier partition. The boundary tensor's
gradient is only part of the tensor's, since other partitions may use the tensor, too.
``register_hook`` adds the hook to a dict of the tensor, which autograd knows. So the boundary
tensors of one tensor share a dict that autograd does not know. It is tied to the tensor's own node
later: in a step, before that node goes backward; in a call, when the partition ends.

A recomputed layer registers its hooks again; only those of its first computation are called.
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

from pipert._torch import AccumulateGrad
from pipert._typing import Tensors
from pipert.autograd import order

__all__: list[str] = []

Hook = Callable[[Tensor], Tensor | None]


class GradientHooks(OrderedDict[int, Hook]):
    """The hooks on the boundary tensors of one tensor, keyed by the numbers of their handles."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.edge: GradientEdge | None = order.edge_of(tensor)
        """The tensor's place in its graph; ``None`` once the hooks are tied to it."""
        self._tensor = weakref.ref(tensor)
        self._boundary: list[weakref.ref[Tensor]] = []

    def give(self, entered: Tensor) -> None:
        """Make ``entered`` register its hooks in this dict."""
        entered._backward_hooks = self
        self._boundary.append(weakref.ref(entered))

    def tie(self) -> None:
        """Register the hooks, if any, on the tensor's own gradient. Idempotent."""
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
        *_, carrier = order.enter((torch.empty(0, device="cpu"),) * (edge.output_nr + 1))
        carrier._backward_hooks = self  # the node takes the dict and the output's number from it
        node._register_hook_dict(carrier)

    def _retain(self) -> None:
        """If one retains its gradient, let each, and the original, retain the whole one."""
        tensor, alive = self._tensor(), [weak() for weak in self._boundary]
        unchanged = [x for x in alive if x is not None and _hooks_of(x) is self]
        if any(entered.retains_grad for entered in unchanged):
            for entered in unchanged:
                copy_gradient(entered, entered)
            if tensor is not None:
                tensor.retain_grad()

    def _call(self, gradient: Tensor) -> Tensor:
        for hook in list(self.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient


def hooks_for(tensor: Tensor) -> GradientHooks:
    """Return the hooks for a boundary tensor of ``tensor``, which may be one itself."""
    hooks = _hooks_of(tensor)
    return hooks if isinstance(hooks, GradientHooks) else GradientHooks(tensor)


def begin_again(
    begin: Callable[[Tensors], Tensors] | None,
    retaining: Iterable[tuple[int, Tensor]],
    tensors: Tensors,
) -> Tensors:
    """Begin the graph of a recomputed layer. Hooks that the layer registers now are not called.

    Args:
        begin: begins a graph with tensors; ``None`` makes them leaves.
        retaining: arguments of the first computation that retain their gradients, each with the
            index of its counterpart among ``tensors``.
        tensors: the differentiable arguments of the recomputation.
    """
    begun = tuple([x.requires_grad_() for x in tensors]) if begin is None else begin(tensors)
    for tensor in begun:
        tensor._backward_hooks = OrderedDict()  # a dict that autograd does not know
    for number, tensor in retaining:
        copy_gradient(tensor, begun[number])
    return begun


def _hooks_of(tensor: Tensor) -> Any:
    return tensor._backward_hooks


def copy_gradient(source: Tensor, target: Tensor) -> None:
    """Set ``target.grad`` to the gradient of ``source`` when that is computed.

    A pre-hook of the node runs after all hooks of the tensor, even those registered later: a layer
    may be recomputed before a later partition has run. A node at which a graph begins is never
    executed, so there it must be a hook of the tensor.
    """
    hooks, weak = _hooks_of(source), weakref.ref(target)
    edge = hooks.edge if isinstance(hooks, GradientHooks) else order.edge_of(source)
    if edge is None or type(edge.node) in _NEVER_EXECUTED:
        source.register_hook(partial(_set_gradient, weak))  # type: ignore[no-untyped-call]
    else:
        edge.node.register_prehook(partial(_set_gradient_of_output, weak, edge.output_nr))


_NEVER_EXECUTED = frozenset({AccumulateGrad, order.ENTERED})


def _set_gradient_of_output(weak: weakref.ref[Tensor], number: int, gradients: Tensors) -> None:
    if gradients[number] is not None:
        _set_gradient(weak, gradients[number])


def _set_gradient(weak: weakref.ref[Tensor], gradient: Tensor) -> None:
    tensor = weak()
    if tensor is not None:
        tensor.grad = gradient.detach().to(tensor.device, copy=True)
