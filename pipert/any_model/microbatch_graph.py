"""Notes what crosses to another partition in a step of any model, and refuses what it cannot see.

One thread makes and numbers all nodes of a micro-batch (but see rules 2 and 3 of
``autograd.leaves``). So the number of a tensor's node tells which partition has made the tensor.
Where a later partition uses it, the tensor crosses (``stage.ledger``): a *boundary tensor*, with
the same values but another graph, takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, repeat
from operator import is_

from torch import Tensor
from torch.autograd.graph import Node

from pipert._torch import is_wrapped, node_count, sequence_nr
from pipert._typing import Tensors, Value
from pipert.any_model.boundary_tensors import BoundaryTensors
from pipert.autograd import order
from pipert.autograd.leaves import Behind, leaves_behind
from pipert.autograd.order import ENTERED
from pipert.batch.tensors import differentiable
from pipert.stage.ledger import Ledger


class MicroBatchGraph:
    """The graphs of one micro-batch's partitions.

    Used by the thread of the micro-batch, and later by the workers that carry out its ``B[i,j]``.

    Args:
        i: the micro-batch.
        ledger: that of the step.
    """

    def __init__(self, i: int, ledger: Ledger) -> None:
        self._i = i
        self._ledger = ledger
        self.boundary = BoundaryTensors(cuts=True)
        self.j = self.first = 0
        """The partition that is running, or the last one, and the number of its first node."""
        self.earlier = range(0)
        """The numbers of the nodes of earlier partitions. The caller's are lower."""
        self._numbers: dict[int, range] = {}  # of the nodes of each partition that has ended
        self._mark = object()  # marks the nodes at which graphs begin as this micro-batch's

    def begin(self, j: int) -> None:
        """Begin partition ``j``."""
        self.j, self.first = j, node_count()
        start = next(iter(self._numbers.values())).start if self._numbers else self.first
        self.earlier = range(start, self.first)

    def end(self) -> None:
        """End the partition."""
        self._numbers[self.j] = range(self.first, node_count())

    def enter_inputs(self, x: Value) -> Value:
        """Return the model's inputs with a graph that begins in partition 0."""
        xs, rebuild = differentiable(x)
        return rebuild(self._cross(None, xs, xs)) if xs else x

    def enter(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Return the boundary tensor, with the values of ``value``, of an earlier ``tensor``."""
        number, origin = sequence_nr(tensor.grad_fn), None
        for j, numbers in self._numbers.items():
            if number in numbers:
                origin = j
        (entered,) = self._cross(origin, (tensor,), (value,))
        return entered

    def _cross(self, origin: int | None, tensors: Tensors, values: Tensors) -> Tensors:
        entered = self._ledger.cross(self._i, self.j, origin, tensors, values)
        entered[0].grad_fn.mark = self._mark  # type: ignore[union-attr]
        return entered

    def look_behind(self, j: int, ends: list[Node]) -> Behind:
        """Return what is behind the ends of partition ``j``; refuse what has entered it unseen."""
        behind = leaves_behind(ends, [order.ENTRANCE], self._numbers[j])
        self._refuse_unseen(j, behind)
        return behind

    def _refuse_unseen(self, j: int, behind: Behind) -> None:
        """Refuse a graph that leads on where a tensor has entered unseen.

        Tensors do so through custom autograd functions, compiled code, transforms, objects and
        closures. The graph is not cut there: two partitions would go through the same nodes.

        Args:
            j: the partition to go backward.
            behind: what is behind its ends.

        Raises:
            RuntimeError: the graph leads into that of an earlier partition, or of another
                micro-batch or call.
        """
        is_entrance = map(is_, map(type, behind.nodes), repeat(ENTERED))
        for node in compress(behind.nodes, is_entrance):
            if getattr(node, "mark", self._mark) is not self._mark:
                raise RuntimeError(_KEPT)
        earlier = range(next(iter(self._numbers.values())).start, self._numbers[j].start)
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
        graphs = [self._ledger.graphs[self._i, j] for j in (*self._numbers, self.j)]
        cut = {c.entered.node: c.left for graph in graphs for c in graph.entered}
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


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    """Return the nodes of those that require grad.

    Tensors that a transform of torch.func wraps are left out: they are in a graph of its own, which
    ends with the transform.
    """
    return [
        order.edge_of(tensor).node
        for tensor in tensors
        if tensor.requires_grad and not is_wrapped(tensor)
    ]


def _reachable(roots: Iterable[Node], stop: Iterable[Node]) -> set[Node]:
    """Return the nodes that a backward from ``roots`` reaches, without going past ``stop``."""
    behind = leaves_behind(roots, stop=stop)
    return {*behind.nodes, *_nodes(behind.leaves)}


_KEPT = (
    "the model uses a tensor with a graph that it has kept from another call or micro-batch, which "
    "forward_backward cannot go back through; detach it there, or call the pipe and "
    "loss.backward()"
)
