"""Refuses gradients that a model requests inside its ``forward`` and that a step cannot compute.

In a step the graph is cut where partitions begin, so ``torch.autograd.grad`` and ``backward`` do
not reach earlier partitions: torch would raise an error, return ``None`` (with ``allow_unused``),
or return part of a sum. So a request that leads through an earlier partition is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipert._torch import is_wrapped
from pipert._typing import Tensors

__all__: list[str] = []


def refuse_going_back(
    outputs: Tensors,
    inputs: Tensors | None,
    bring: Callable[[Tensor], Tensor],
    entrances: Mapping[Node, GradientEdge | None],
) -> None:
    """Refuse to differentiate from a model's own code into an earlier partition.

    Args:
        outputs: the tensors to differentiate.
        inputs: the tensors to differentiate by; ``None`` for all leaves of the graph.
        bring: returns the tensor that replaces a tensor in the current partition.
        entrances: the first nodes of the graphs of partitions, each with the edge of the earlier
            partition at which the graph was cut, or ``None`` for an input of the model.

    Raises:
        RuntimeError: an input is beyond such a cut; or ``inputs`` is ``None``, and the graph of the
            outputs leads to such a node.
    """
    wanted = set(_nodes(inputs or ()))
    found = _reachable(_nodes(map(bring, outputs)), stop=_nodes(map(bring, inputs or ())))
    if inputs is None and not found.isdisjoint(entrances):
        raise RuntimeError(_GOES_BACK)
    while ends := [edge.node for node in found if (edge := entrances.get(node)) is not None]:
        found = _reachable(ends, stop=())
        if wanted & found:
            raise RuntimeError(_GOES_BACK)


def refuse_through(unseen: Iterable[GradientEdge], leaves: Iterable[Tensor]) -> None:
    """Refuse a backward that would run through an unseen boundary into an earlier partition.

    Autograd executes every node on the way to a wanted gradient. Where that way leads through an
    earlier partition, whose own backward executes the same nodes, gradients would be counted twice.

    Args:
        unseen: the edges at which tensors of earlier partitions entered unseen; the graph is to end
            there.
        leaves: parameters whose gradients are wanted as well.

    Raises:
        RuntimeError: one of the leaves, or another of the edges, is beyond such an edge.
    """
    ends = {edge.node for edge in unseen}
    children = [child for node in ends for child, _ in node.next_functions if child is not None]
    if not _reachable(children, stop=()).isdisjoint((*ends, *_nodes(leaves))):
        raise RuntimeError(
            "a partition uses a tensor that an earlier one has made, where a step of a pipe does "
            "not see it (in a custom autograd function, in compiled code, or in an object or a "
            "closure that a layer is given), and also uses another such tensor, or a parameter, "
            "from which it was computed; pass tensor.clone(), or the tensor itself, or register "
            "the object's class (torch.utils._pytree.register_dataclass), or call the pipe and "
            "loss.backward()"
        )


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    """Return the nodes of those that require grad.

    Tensors that a transform of torch.func wraps are left out: they are in a graph of its own, which
    ends with the transform.
    """
    return [
        get_gradient_edge(tensor).node
        for tensor in tensors
        if tensor.requires_grad and not is_wrapped(tensor)
    ]


def _reachable(roots: Iterable[Node], stop: Iterable[Node]) -> set[Node]:
    """Return the nodes that a backward from ``roots`` reaches, without going past ``stop``."""
    left = [*roots]
    seen: set[Any] = {*left, *stop, None}
    while left:
        for child, _ in left.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                left.append(child)
    return seen - {*stop, None}


_GOES_BACK = (
    "torch.autograd.grad or backward in a model's own code goes back into an earlier partition, or "
    "to the inputs of the model, which a step of a pipe can do only after the loss is computed; "
    "call the pipe and loss.backward(), or cut elsewhere"
)
