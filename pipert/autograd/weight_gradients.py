"""Puts off the gradients of weights, for which no other partition waits (arXiv:2401.10241).

The backward of a matrix product or a convolution computes two gradients: that of its input, which
the partition before waits for, and that of its weight. So ``B[i,j]`` asks the engine for the first
alone, and for the gradient that arrives at the node. ``W[i,j]`` computes the second from that and
from the input that the node has saved. Until then these two tensors are kept, and no graph.

A weight is put off if that is known to be the same:

1. All of its uses behind the outputs are nodes in ``_RULES``. What is not known stays in ``B``.
2. It is a leaf, behind nothing but transposes and the cast of autocast.
3. It is an ordinary dense tensor on the device of its use, has not been frozen since, and gets a
   gradient of its own dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from pipert._torch import AccumulateGrad, sequence_nr
from pipert.autograd.checkpoint import before_backward
from pipert.autograd.leaves import Behind

__all__: list[str] = []

ToWeight = Callable[[Tensor], Tensor]
"""Computes the gradient of a weight from that of the result of one of its uses."""


class Later(NamedTuple):
    """One use of a weight whose gradient is computed later."""

    weight: Tensor
    edge: GradientEdge
    """Where the gradient arrives that ``compute`` needs."""
    compute: ToWeight


class _Way(NamedTuple):
    """The way from a use of a weight to the weight."""

    weight: Tensor
    nodes: list[Node]
    is_transposed: bool


class _Rule(NamedTuple):
    """The rule for the nodes of one operation."""

    place: int
    """The place of the weight among the inputs of the node."""
    make: Callable[[Any, _Way], ToWeight | None]
    """Takes what the node has saved; returns ``None`` if the gradient is something else."""


def put_off(behind: Behind, ends: Iterable[Node]) -> tuple[list[Later], list[Tensor]]:
    """Return the uses of weights that are put off, and the leaves that are left.

    Args:
        behind: the graph, which has not been freed.
        ends: the nodes at which its backward starts.
    """
    nodes = [node for node in behind.nodes if node is not None]
    uses = [node for node in nodes if type(node).__name__ in _RULES]
    later, owner = list[Later](), dict[Node, int]()
    for node in sorted(uses, key=sequence_nr):  # the same order in each run
        rule = _RULES[type(node).__name__]
        way = _way_to_weight(node.next_functions[rule.place][0])
        if way is None:
            continue
        with before_backward():
            compute = rule.make(node, way)
        if compute is not None:
            later.append(Later(way.weight, GradientEdge(node, 0), compute))
            owner.update(dict.fromkeys(way.nodes, id(way.weight)))
    found = Counter([id(one.weight) for one in later])
    found.subtract([owner[end] for end in ends if end in owner])
    for node in nodes if later else ():
        if node not in owner:
            found.subtract([owner[child] for child, _ in node.next_functions if child in owner])
    kept = [one for one in later if not found[id(one.weight)]]
    weights = {id(one.weight) for one in kept}
    return kept, [leaf for leaf in behind.leaves if id(leaf) not in weights]


def _way_to_weight(node: Any) -> _Way | None:
    nodes, is_transposed = list[Node](), False
    while node is not None:
        nodes.append(node)
        if type(node) is AccumulateGrad:
            weight = node.variable
            return _Way(weight, nodes, is_transposed) if _is_ordinary(weight) else None
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
        and not weight.is_complex()
    )


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved by its documented attribute, ``None`` if it has no such."""
    return getattr(node, f"_saved_{name}", None)


def _of_product(name: str, node: Any, way: _Way) -> ToWeight | None:
    x = _saved(node, name)
    if not _is_beside(x, way.weight) or _saved(node, "alpha") not in (None, 1):
        return None
    x = x.detach()
    # In the layout of the weight, as the engine does.
    return partial(_product_transposed if way.is_transposed else _product, x, way.weight.dtype)


def _product(x: Tensor, dtype: torch.dtype, dy: Tensor) -> Tensor:
    return (x.t() @ dy).to(dtype)


def _product_transposed(x: Tensor, dtype: torch.dtype, dy: Tensor) -> Tensor:
    return (dy.t() @ x).to(dtype)


def _of_convolution(node: Any, way: _Way) -> ToWeight | None:
    x, w = _saved(node, "input"), _saved(node, "weight")
    if way.is_transposed or not (_is_beside(x, way.weight) and _is_beside(w, way.weight)):
        return None
    settings = [_saved(node, name) for name in _SETTINGS]
    return partial(_convolved, x.detach(), w.detach(), settings, way.weight.dtype)


_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _is_beside(saved: Any, weight: Tensor) -> bool:
    """Whether a node has ``saved`` a dense tensor on the device of ``weight``."""
    return (
        isinstance(saved, Tensor)
        and saved.layout == torch.strided
        and saved.device == weight.device
    )


def _convolved(
    x: Tensor, w: Tensor, settings: list[Any], dtype: torch.dtype, dy: Tensor
) -> Tensor:
    wanted = [False, True, False]
    found: Tensor
    _, found, _ = torch.ops.aten.convolution_backward(dy, x, w, None, *settings, wanted)
    return found.to(dtype)


_RULES = {
    "AddmmBackward0": _Rule(2, partial(_of_product, "mat1")),
    "MmBackward0": _Rule(1, partial(_of_product, "self")),
    "ConvolutionBackward0": _Rule(1, _of_convolution),
}
"""By the name of a node. A node of another name computes all its gradients in ``B``."""
