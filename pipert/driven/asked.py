"""Gradients that a model asks for in the middle of its ``forward``.

In a step the graph is cut where partitions begin, so ``torch.autograd.grad`` and ``backward`` find
nothing behind that: an error of torch's, or ``None`` where that is allowed, or a part of a sum. So
what goes through an earlier partition is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipert._typing import Tensors

__all__: list[str] = []


def refuse_going_back(
    outputs: Tensors,
    inputs: Tensors | None,
    bring: Callable[[Tensor], Tensor],
    cut: Mapping[Node, GradientEdge | None],
) -> None:
    """Refuse to go back from a model's own code into an earlier partition.

    Args:
        outputs: what is differentiated.
        inputs: by what; ``None`` for all that is behind it.
        bring: says what stands for a tensor in the partition that is current.
        cut: the nodes with which graphs of partitions begin, each with where it goes on.

    Raises:
        RuntimeError: an input is behind one of those, or all that is there is asked for.
    """
    wanted = set(_nodes(inputs or ()))
    found = _behind(_nodes(map(bring, outputs)), stop=_nodes(map(bring, inputs or ())))
    if inputs is None and not found.isdisjoint(cut):
        raise RuntimeError(_GOES_BACK)
    while ends := [edge.node for node in found if (edge := cut.get(node)) is not None]:
        found = _behind(ends, stop=())
        if wanted & found:
            raise RuntimeError(_GOES_BACK)


def refuse_through(cut: Iterable[GradientEdge], leaves: Iterable[Tensor]) -> None:
    """Refuse a backward that would go on where nobody has seen a tensor of an earlier partition.

    Autograd goes through all that is in front of a wanted gradient, so it would go back through the
    earlier partition, which that does itself: gradients would be counted twice.

    Args:
        cut: the places where the graph is to end.
        leaves: parameters whose gradients are wanted, too.

    Raises:
        RuntimeError: one of the leaves, or another of those places, is behind such a place.
    """
    ends = {edge.node for edge in cut}
    children = [child for node in ends for child, _ in node.next_functions if child is not None]
    if not _behind(children, stop=()).isdisjoint((*ends, *_nodes(leaves))):
        raise RuntimeError(
            "a custom autograd function or compiled code, or a layer that is given it in an object "
            "or a closure, uses a tensor that an earlier partition has made, where a step of a "
            "pipe does not see it, and the same partition uses another such tensor, or a "
            "parameter, that this one was computed from; pass tensor.clone(), or the tensor "
            "itself, or register the object's class (torch.utils._pytree.register_dataclass), or "
            "call the pipe and loss.backward()"
        )


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    """Their nodes in the graph. A transform of torch.func has one of its own, which ends there."""
    wanting = [tensor for tensor in tensors if tensor.requires_grad]
    return [get_gradient_edge(one).node for one in wanting if not is_functorch_wrapped_tensor(one)]


def _behind(ends: Iterable[Node], stop: Iterable[Node]) -> set[Node]:
    """The nodes of a graph, as far as those where to stop."""
    left = [*ends]
    seen: set[Any] = {*left, *stop, None}
    while left:
        for child, _ in left.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                left.append(child)
    return seen - {*stop, None}


_GOES_BACK = (
    "torch.autograd.grad or backward in a model's own code goes back into an earlier partition, or "
    "to the inputs of the model, which a step of a pipe does when all is computed; call the pipe "
    "and loss.backward(), or cut elsewhere"
)
