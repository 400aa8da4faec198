"""Gradients that a model asks for in the middle of its ``forward``.

In a step the graph is cut where partitions begin, so ``torch.autograd.grad`` finds nothing behind
that: an error of torch's, or ``None`` where that is allowed, or a part of a sum. So what goes
through an earlier partition is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipert._typing import Tensors

__all__: list[str] = []


def refuse_asking(
    outputs: Tensors,
    inputs: Tensors,
    bring: Callable[[Tensor], Tensor],
    cut: Mapping[Node, GradientEdge | None],
) -> None:
    """Refuse a call of ``autograd.grad`` that would go back into an earlier partition.

    Args:
        outputs: what is differentiated.
        inputs: by what.
        bring: says what stands for a tensor in the partition that is current.
        cut: the nodes with which graphs of partitions begin, each with where it goes on.

    Raises:
        RuntimeError: an input is behind one of those.
    """
    wanted = set(_nodes(inputs))
    found = _behind(_nodes(map(bring, outputs)), stop=_nodes(map(bring, inputs)))
    while ends := [edge.node for node in found if (edge := cut.get(node)) is not None]:
        found = _behind(ends, stop=())
        if wanted & found:
            raise RuntimeError(
                "torch.autograd.grad in a model's own code goes back into an earlier partition, "
                "which a step of a pipe does when all is computed; call the pipe and "
                "loss.backward(), or cut elsewhere"
            )


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    return [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]


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
