"""Notes what crosses to another partition in a step of any model, and refuses what it cannot see.

One thread makes and numbers all nodes of a micro-batch (but see rules 2 and 3 of
``autograd.leaves``). So the number of a tensor's node tells which partition has made the tensor.
Where a later partition uses it, the tensor crosses (``stage.ledger``): a *boundary tensor*, with
the same values but another graph, takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
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
        self._ledger.graphs[self._i, j].look_behind = partial(self._look_behind, j)

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

    def _look_behind(self, j: int, ends: list[Node]) -> Behind:
        """Return what is behind the ends of partition ``j``.

        Raises:
            RuntimeError: a tensor has entered it unseen, through a custom autograd function,
                compiled code, a transform, an object or a closure. The graph is not cut there, and
                leads into that of an earlier partition, or of another micro-batch or call.
        """
        behind = leaves_behind(ends, [order.ENTRANCE], self._numbers[j])
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
        return behind

    def refuse_going_back(self, outputs: Tensors, inputs: Tensors, brought: Tensors) -> None:
        """Refuse ``torch.autograd.grad`` that leads through an earlier partition (forces, say).

        torch would return ``None`` (with ``allow_unused``), or part of a sum. If no inputs are
        given, the node at the cut itself raises an error.

        Args:
            outputs: the tensors to differentiate.
            inputs: the tensors to differentiate by.
            brought: the boundary tensors that take their places, or themselves.
        """
        graphs = [self._ledger.graphs[self._i, j] for j in (*self._numbers, self.j)]
        cut = {c.entered.node: c.left for graph in graphs for c in graph.entered}
        wanted = set(_nodes(inputs))
        behind = leaves_behind(_nodes(outputs), stop=_nodes(brought))
        while ends := [edge.node for node in behind.nodes if (edge := cut.get(node)) is not None]:
            behind = leaves_behind(ends, stop=())
            if not wanted.isdisjoint((*behind.nodes, *_nodes(behind.leaves))):
                raise RuntimeError(
                    "torch.autograd.grad or backward in a model's own code goes back into an "
                    "earlier partition, or to the inputs of the model, which a step of a pipe can "
                    "do only after the loss is computed; call the pipe and loss.backward(), or cut "
                    "elsewhere"
                )


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    """Return their nodes, except in a transform of torch.func, which has a graph of its own."""
    return [order.edge_of(x).node for x in tensors if x.requires_grad and not is_wrapped(x)]


_KEPT = (
    "the model uses a tensor with a graph that it has kept from another call or micro-batch, which "
    "forward_backward cannot go back through; detach it there, or call the pipe and "
    "loss.backward()"
)
