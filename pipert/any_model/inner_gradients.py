"""Refuses gradients that a step cannot compute, as its graph is cut where partitions begin."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipert._torch import is_wrapped
from pipert._typing import Tensors
from pipert.any_model.microbatch_graph import MicroBatchGraph
from pipert.autograd.leaves import leaves_behind

__all__: list[str] = []


def refuse_going_back(
    outputs: Tensors, inputs: Tensors, brought: Tensors, graph: MicroBatchGraph
) -> None:
    """Refuse ``torch.autograd.grad`` and ``backward`` that lead through an earlier partition.

    At such a cut torch would raise an error, return ``None`` (with ``allow_unused``), or return
    part of a sum. If no inputs are given, the node at the cut itself raises an error.

    Args:
        outputs: the tensors to differentiate.
        inputs: the tensors to differentiate by.
        brought: the boundary tensors that take their places, or themselves.
        graph: the graph that is cut.

    Raises:
        RuntimeError: an input is beyond a cut.
    """
    entries = [entry for part in graph.partitions.values() for entry in part.entries]
    cut = {edge.node: source.edge for edge, source in entries}
    wanted = set(_nodes(inputs))
    found = _reachable(_nodes(outputs), stop=_nodes(brought))
    while ends := [edge.node for node in found if (edge := cut.get(node)) is not None]:
        found = _reachable(ends, stop=())
        if wanted & found:
            raise RuntimeError(
                "torch.autograd.grad or backward in a model's own code goes back into an earlier "
                "partition, or to the inputs of the model, which a step of a pipe can do only "
                "after the loss is computed; call the pipe and loss.backward(), or cut elsewhere"
            )


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
    return leaves_behind(roots, stop=stop).nodes - {*stop, None}
