"""The graph of one micro-batch in a step, cut where tensors pass from partition to partition.

One thread makes and numbers all nodes of a micro-batch (but see rules 2 and 3 of
``autograd.leaves``). So the number of a tensor's node tells which partition has made the tensor.
Where a later partition uses it, the graph is cut: a *boundary tensor*, with the same values but
another graph, takes its place. ``B[i,j]`` keeps the boundary tensor's gradient for the ``B`` of the
partition that made the tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipert._torch import is_wrapped, node_count, sequence_nr
from pipert._typing import Tensors, Value
from pipert.any_model.boundary_tensors import BoundaryTensors
from pipert.autograd import order
from pipert.autograd.leaves import Behind, leaves_behind
from pipert.autograd.order import ENTERED
from pipert.autograd.segment import edges_of
from pipert.batch.tensors import differentiable

Key = tuple[Node | None, int]
"""A tensor's place in the graph."""


@dataclass(slots=True, eq=False)
class SourceTensor:
    """A tensor that later partitions use, and the gradients that they have sent back."""

    edge: GradientEdge | None
    """The tensor's place in the graph; ``None`` for an input of the model."""
    gradients: list[tuple[Tensor, int]] = field(default_factory=list)
    """Each with the partition that sent it."""


@dataclass(slots=True, eq=False)
class PartitionGraph:
    """What ``B[i,j]`` needs from ``F[i,j]``. Its nodes are numbered ``range(first, last)``."""

    first: int
    last: int
    entries: list[tuple[GradientEdge, SourceTensor]] = field(default_factory=list)
    """The edge at which each tensor of an earlier partition entered, and its source."""
    sources: dict[Key, SourceTensor] = field(default_factory=dict)
    """The tensors made in the partition and used by later ones, by place in the graph."""
    loss: Tensor | None = None


class MicroBatchGraph:
    """The graphs of one micro-batch's partitions.

    Used by the thread of the micro-batch, and later by the workers that carry out its ``B[i,j]``.
    """

    def __init__(self) -> None:
        self.partitions: dict[int, PartitionGraph] = {}
        self.boundary = BoundaryTensors(cuts=True)
        self.current = PartitionGraph(0, 0)
        """The graph of the partition that is running, or the last one."""
        self.earlier = range(0)
        """The numbers of the nodes of earlier partitions. The caller's are lower."""
        self._entered: list[PartitionGraph] = []  # those that were entered, in order
        self._starts: list[int] = []  # the number of the first node of each
        self._mark = object()  # marks the nodes at which graphs begin as this micro-batch's

    def begin(self, j: int) -> None:
        """Begin partition ``j``."""
        self.current = self.partitions[j] = PartitionGraph(node_count(), -1)
        self._entered.append(self.current)
        self._starts.append(self.current.first)
        self.earlier = range(self._starts[0], self.current.first)

    def end(self) -> None:
        """End the partition."""
        self.current.last = node_count()

    def enter_inputs(self, x: Value) -> Value:
        """Return the model's inputs with a graph that begins in partition 0."""
        xs, rebuild = differentiable(x)
        if not xs:
            return x
        entered = self._begin_graph(xs)
        self.current.entries += [(edge, SourceTensor(None)) for edge in edges_of(entered)]
        return rebuild(entered)

    def enter(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Return the boundary tensor, with the values of ``value``, of an earlier ``tensor``."""
        key = tensor.grad_fn, tensor.output_nr
        sources = self._made_in(sequence_nr(tensor.grad_fn)).sources
        source = sources.get(key)
        if source is None:
            source = sources[key] = SourceTensor(order.edge_of(tensor))
        (entered,) = self._begin_graph((value,))
        self.current.entries.append((order.edge_of(entered), source))
        return entered

    def refuse_unseen(self, part: PartitionGraph, behind: Behind) -> None:
        """Refuse a graph that leads on where a tensor has entered unseen.

        Tensors do so through custom autograd functions, compiled code, transforms, objects and
        closures. The graph is not cut there: two partitions would go through the same nodes.

        Args:
            part: the partition to go backward.
            behind: what is behind its ends.

        Raises:
            RuntimeError: the graph leads into that of an earlier partition, or of another
                micro-batch or call.
        """
        for node in behind.nodes:
            if type(node) is ENTERED and getattr(node, "mark", self._mark) is not self._mark:
                raise RuntimeError(_KEPT)
        earlier = range(self._starts[0], part.first)
        if any(sequence_nr(node) in earlier for node in behind.others):
            raise RuntimeError(
                "a partition uses a tensor that an earlier one has made, where a step of a pipe "
                "does not see it (in a custom autograd function, in compiled code, in a transform "
                "of torch.func, or in an object or a closure that a layer is given); pass "
                "tensor.clone(), or the tensor itself, or register the object's class "
                "(torch.utils._pytree.register_dataclass), or call the pipe and loss.backward()"
            )

    def refuse_going_back(self, outputs: Tensors, inputs: Tensors, brought: Tensors) -> None:
        """Refuse ``torch.autograd.grad`` and ``backward`` that lead through an earlier partition.

        At such a cut torch would raise an error, return ``None`` (with ``allow_unused``), or return
        part of a sum. If no inputs are given, the node at the cut itself raises an error.

        Args:
            outputs: the tensors to differentiate.
            inputs: the tensors to differentiate by.
            brought: the boundary tensors that take their places, or themselves.

        Raises:
            RuntimeError: an input is beyond a cut.
        """
        entries = [entry for part in self.partitions.values() for entry in part.entries]
        cut = {edge.node: source.edge for edge, source in entries}
        wanted = set(_nodes(inputs))
        found = _reachable(_nodes(outputs), stop=_nodes(brought))
        while ends := [edge.node for node in found if (edge := cut.get(node)) is not None]:
            found = _reachable(ends, stop=())
            if wanted & found:
                raise RuntimeError(
                    "torch.autograd.grad or backward in a model's own code goes back into an "
                    "earlier partition, or to the inputs of the model, which a step of a pipe can "
                    "do only after the loss is computed; call the pipe and loss.backward(), or cut "
                    "elsewhere"
                )

    def _begin_graph(self, xs: Tensors) -> Tensors:
        entered = order.enter(xs)
        entered[0].grad_fn.mark = self._mark  # type: ignore[union-attr]
        return entered

    def _made_in(self, number: int) -> PartitionGraph:
        """Return the partition in which the node with this number was made."""
        return self._entered[bisect_right(self._starts, number) - 1]


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


_KEPT = (
    "the model uses a tensor with a graph that it has kept from another call or micro-batch, which "
    "forward_backward cannot go back through; detach it there, or call the pipe and "
    "loss.backward()"
)
