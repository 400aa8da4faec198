"""Puts off the gradients of weights, for which no other partition waits (arXiv:2401.10241).

The backward of a matrix product or a convolution computes two gradients: that of its input, which
the partition before waits for, and that of its weight. So ``B[i,j]`` asks the engine for the first
alone, and notes the gradient that arrives at the node. ``W[i,j]`` computes the second from that and
from the input that the node has saved. Until then these two tensors are kept, and no graph.

A weight is put off if that is known to be the same:

1. All of its uses behind the outputs are nodes in ``_RULES``. What is not known stays in ``B``.
2. It is a leaf, behind nothing but transposes and the cast of autocast; the engine goes that way.
3. It is an ordinary dense tensor on the device of its use, has not been frozen since, and gets a
   gradient of its own dtype.
4. Nobody sees more than that: the node has no hooks of its own, and no saved-tensor hooks see its
   input, which would unpack it twice. Hooks on the tensor that it made are called before what
   arrives is noted.

Neither of the two tensors may be changed in place before ``W[i,j]``, which is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import AccumulateGrad, sequence_nr
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import Behind
from pipert.batch.tensors import version

__all__: list[str] = []

ToWeight = Callable[[Tensor, Tensor], Tensor]
"""Computes the gradient of a weight from the input and the gradient of one of its uses."""


class _Rule(NamedTuple):
    """The rule for the nodes of one operation."""

    place: int
    """The place of the weight among the inputs of the node."""
    saved: str
    """The name of the input that the weight meets, among what the node saves."""
    make: Callable[[Any, bool, Tensor], ToWeight | None]
    """Takes the node, whether the weight is transposed on the way, and the weight."""


class _Way(NamedTuple):
    """The way from a use of a weight to the weight."""

    weight: Tensor
    edge: GradientEdge
    nodes: list[Node]
    is_transposed: bool


class _Kept:
    """A tensor that is kept for ``W[i,j]``, and its version."""

    __slots__ = ("_tensor", "_version")

    def keep(self, tensor: Tensor) -> Tensor:
        self._tensor, self._version = tensor, version(tensor)
        return tensor

    def get(self, _: object = None) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        if version(self._tensor) != self._version:
            raise RuntimeError(
                "a tensor needed for the gradient of a weight was modified in place before that "
                "was computed, which the schedule does later; clone it, or use schedule='1f1b'"
            )
        return self._tensor


class Later:
    """One use of a weight whose gradient is computed later."""

    __slots__ = ("_compute", "_dy", "_edge", "_handle", "_x", "node", "weight")

    def __init__(self, node: Any, way: _Way, x: _Kept, compute: ToWeight) -> None:
        self.weight = way.weight
        self.node: Any = GradientEdge(node, 0)
        """Where the gradient arrives; to be asked for, so that the engine goes there."""
        self._edge: Any = way.edge
        self._x, self._compute = x, compute
        self._dy: _Kept | None = None
        self._handle = node.register_prehook(self._see)  # after all others

    def _see(self, dys: Sequence[Tensor | None]) -> None:
        if dys[0] is not None:
            self._dy = _Kept()
            self._dy.keep(dys[0])

    def end(self, captured: Tensor | None) -> bool:
        """Forget the node, after the backward. Return whether a gradient has arrived.

        ``captured`` is what the engine returned: if it did not execute the node, hooks on tensors
        have seen that, and there are no others.
        """
        self._handle.remove()
        self.node = None
        if self._dy is None and captured is not None:
            self._dy = _Kept()
            self._dy.keep(captured)
        return self._dy is not None


def put_off(behind: Behind, ends: Iterable[Node]) -> tuple[list[Later], list[Tensor]]:
    """Return the uses of weights that are put off, and the leaves that are left.

    Args:
        behind: the graph, which has not been freed.
        ends: the nodes at which its backward starts.
    """
    nodes = [node for node in behind.nodes if node is not None]
    uses = [node for node in nodes if type(node).__name__ in _RULES]
    ways, owner = list[tuple[Any, _Way, ToWeight]](), dict[Node, int]()
    for node in sorted(uses, key=sequence_nr):  # the same order in each run
        rule = _RULES[type(node).__name__]
        way = _way_to_weight(*node.next_functions[rule.place])
        compute = None if way is None else rule.make(node, way.is_transposed, way.weight)
        if way is not None and compute is not None and _is_free_of_hooks(node):
            ways.append((node, way, compute))
            owner.update(dict.fromkeys(way.nodes, id(way.weight)))
    found = Counter([id(way.weight) for _, way, _ in ways])
    found.subtract([owner[end] for end in ends if end in owner])
    for node in nodes if ways else ():
        if node not in owner:
            found.subtract([owner[child] for child, _ in node.next_functions if child in owner])
    taken = [
        (node, way, _take(node, way.weight), compute)
        for node, way, compute in ways
        if not found[id(way.weight)]
    ]
    left = {id(way.weight) for _, way, x, _ in taken if x is None}
    later = [
        Later(node, way, x, compute)
        for node, way, x, compute in taken
        if x is not None and id(way.weight) not in left
    ]
    weights = {id(one.weight) for one in later}
    return later, [leaf for leaf in behind.leaves if id(leaf) not in weights]


def compute_later(later: list[Later]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights and their gradients. Empties the list, to free memory as it goes."""
    sums: dict[tuple[Any, int], tuple[Later, Tensor]] = {}
    later.reverse()
    while later:
        one = later.pop()
        assert one._dy is not None
        with torch.no_grad():
            found = one._compute(one._x.get(), one._dy.get())
        key = one._edge.node, one._edge.output_nr
        sums[key] = one, found if key not in sums else sums[key][1] + found
    # Hooks on a cast or a transposed weight see the sum of all uses.
    weights = list({id(one.weight): one.weight for one, _ in sums.values()}.values())
    edges = [one._edge for one, _ in sums.values()]
    found_all = differentiate(edges, weights, [total for _, total in sums.values()])
    return weights, list(found_all)


def _is_free_of_hooks(node: Any) -> bool:
    """Whether nobody sees what ``node`` gets and returns."""
    for handle in node.register_hook(_no_hook), node.register_prehook(_no_hook):
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return False
    return True


def _no_hook(*_: object) -> None:
    pass


def _way_to_weight(node: Any, output: int) -> _Way | None:
    edge, nodes, is_transposed = None, list[Node](), False
    while node is not None:
        edge = edge or GradientEdge(node, output)
        nodes.append(node)
        if type(node) is AccumulateGrad:
            weight = node.variable
            return _Way(weight, edge, nodes, is_transposed) if _is_ordinary(weight) else None
        name = type(node).__name__
        if name == "TBackward0":
            is_transposed = not is_transposed
        elif name != "ToCopyBackward0":
            return None
        node = node.next_functions[0][0]
    return None


def _is_ordinary(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.requires_grad
        and weight.layout == torch.strided
        and weight.grad_dtype in (None, weight.dtype)
    )


def _take(node: Any, weight: Tensor) -> _Kept | None:
    """Take the input that ``node`` has saved; ``None`` if it cannot be had without more ado."""
    kept = _Kept()
    saved = getattr(node, f"_raw_saved_{_RULES[type(node).__name__].saved}", None)
    if saved is None:
        return None
    try:
        saved.register_hooks(kept.keep, kept.get)  # the only access that unpacks nothing
    except RuntimeError:  # it has other hooks, or was changed in place, which the engine refuses
        return None
    x = kept.get()
    is_beside = type(x) in (Tensor, nn.Parameter) and x.device == weight.device
    return kept if is_beside and x.layout == torch.strided else None


def _of_product(node: Any, is_transposed: bool, _: Tensor) -> ToWeight | None:
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    return _transposed_product if is_transposed else _product


def _product(x: Tensor, dy: Tensor) -> Tensor:
    return x.mH @ dy


def _transposed_product(x: Tensor, dy: Tensor) -> Tensor:
    """Compute the same, in the layout of the weight once it is transposed back."""
    return (dy.t() @ x.conj()).t()


def _of_convolution(node: Any, is_transposed: bool, weight: Tensor) -> ToWeight | None:
    if is_transposed:
        return None
    settings = [getattr(node, f"_saved_{name}", None) for name in _SETTINGS]
    return None if None in settings else partial(_convolved, weight.detach(), settings)


_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _convolved(weight: Tensor, settings: list[Any], x: Tensor, dy: Tensor) -> Tensor:
    w = weight.to(x.dtype)
    found: Tensor
    _, found, _ = torch.ops.aten.convolution_backward(
        dy, x, w, None, *settings, [False, True, False]
    )
    return found


_RULES = {
    "AddmmBackward0": _Rule(2, "mat1", _of_product),
    "MmBackward0": _Rule(1, "self", _of_product),
    "ConvolutionBackward0": _Rule(1, "input", _of_convolution),
}
"""By the name of a node. A node of another name computes all its gradients in ``B``."""
