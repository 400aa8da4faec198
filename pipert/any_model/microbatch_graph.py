"""Notes what crosses to another partition in a step of any model, and refuses what it cannot see.

One thread makes and numbers all nodes of a micro-batch (but see rules 2 and 3 of
``autograd.leaves``). So the number of a tensor's node tells which partition has made the tensor.
Where a later partition uses it, the tensor crosses (``stage.step``): a *boundary tensor*, with
the same values but another graph, takes its place.

A boundary tensor ``s`` may be changed in place. The model still holds the tensor ``x`` of the
earlier partition, which does not know what is done to ``s``::

    x[:, 4:] = y      in partition 1: s is changed, but not the graph of x
    z = f(x)          in partition 2

1. In the partition that has changed it, ``x`` is still replaced by ``s``.
2. In a later partition ``s`` takes the place of ``x``, as the change has left it.
3. *Another* tensor that shares the memory, such as a view, knows nothing of ``s``: it is refused if
   it is used in a later partition, or overlaps and enters the same one. Without a pipe, autograd
   would track the change, because it is made to ``x`` itself. (It rebuilds the graph of a view, so
   that it leads into the earlier partition, which is refused in the backward.)
4. A hook that a layer registers on ``s`` would see a part of the gradient, and is refused. In the
   model's own code hooks are registered on ``x``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import compress, repeat
from operator import is_

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipert._torch import is_wrapped, node_count, sequence_nr, storage_of, tensor_hooks
from pipert._typing import Tensors, Value
from pipert.autograd import order
from pipert.autograd.leaves import Reachable, find_leaves
from pipert.autograd.order import ENTERED
from pipert.batch.tensors import differentiable, version
from pipert.stage.shared_memory import overlap
from pipert.stage.step import Step


class _Boundary:
    """A boundary tensor, with its version and node at first."""

    __slots__ = ("first_node", "first_version", "original", "tensor")

    def __init__(self, original: Tensor, tensor: Tensor) -> None:
        self.original, self.tensor = original, tensor
        self.first_version, self.first_node = version(tensor), tensor.grad_fn

    def has_changed(self) -> bool:
        return version(self.tensor) != self.first_version


class BoundaryTensors:
    """The boundary tensors of one micro-batch.

    Args:
        cuts: whether the graph is cut between partitions, as in a step.
    """

    def __init__(self, cuts: bool) -> None:
        self._cuts = cuts
        self._current: dict[int, _Boundary] = {}  # the partition's, by the id of the original
        self.changed: dict[int, _Boundary] = {}
        """Those that earlier partitions have changed."""
        self._changes: dict[int, int] = {}  # first node of the partition that changed each memory

    def as_left(self, tensor: Tensor) -> Tensor:
        """Return what takes the place of ``tensor`` since an earlier partition (rule 2)."""
        while (changed := self.changed.get(id(tensor))) is not None:
            tensor = changed.tensor
        return tensor

    def find(self, tensor: Tensor) -> Tensor | None:
        """Return the boundary tensor that ``tensor`` already has in this partition (rule 1)."""
        found = self._current.get(id(tensor))
        return None if found is None else found.tensor

    def with_whole_gradient(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose gradient is the sum over all partitions (rule 4)."""
        tensor = self.as_left(tensor)
        found = self._current.get(id(tensor))
        return tensor if found is None or not found.has_changed() else found.tensor

    def add(self, tensor: Tensor, entered: Tensor) -> None:
        """Replace ``tensor`` by ``entered`` from now on."""
        start = self._changes.get(memory_of(tensor)) if self._changes else None
        if start is not None and not (self._cuts and sequence_nr(tensor.grad_fn) >= start):
            raise RuntimeError(_ANOTHER_NAME)
        self._current[id(tensor)] = _Boundary(tensor, entered)

    def end(self, start: int) -> None:
        """End the partition, whose nodes are numbered from ``start``."""
        changed = [one for one in self._current.values() if one.has_changed()]
        for one in changed:
            for other in self._current.values():
                if other is not one and overlap(one.original, other.original):
                    raise RuntimeError(_ANOTHER_NAME)
        for key, one in self._current.items():
            is_tracked = one.tensor.grad_fn is not one.first_node
            if one.tensor.requires_grad and not is_tracked:
                if tensor_hooks(one.tensor) or one.tensor.retains_grad:
                    raise RuntimeError(_HOOKED)
            if one.has_changed():
                self._changes[memory_of(one.original)] = start
                if is_tracked or one.first_node is None or not self._cuts:
                    self.changed[key] = one
        self._current.clear()


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory have in common."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage_of(tensor)


_ANOTHER_NAME = (
    "a tensor that one partition has made is changed in place in a later one, and used under "
    "another name, such as a view, which a pipe cannot follow; change a clone (inplace=False), or "
    "make the view after the change"
)
_HOOKED = (
    "a layer registers a hook on its argument, or retains its gradient, but the argument is a "
    "tensor of an earlier partition, so that the layer would see a part of the gradient; do that "
    "in the model's own code, or with a clone in the layer"
)


class MicroBatchGraph:
    """The graphs of one micro-batch's partitions.

    Used by the thread of the micro-batch, and later by the workers that carry out its ``B[i,j]``.

    Args:
        i: the micro-batch.
        step: what its stages share.
    """

    def __init__(self, i: int, step: Step) -> None:
        self._i = i
        self._step = step
        self.j = self.first = 0
        """The partition that is running, or the last one, and the number of its first node."""
        self.earlier = range(0)
        """The numbers of the nodes of earlier partitions. The caller's are lower."""
        self._starts: dict[int, int] = {}  # the number of the first node of each partition
        self._mark = object()  # marks the nodes at which graphs begin as this micro-batch's

    def begin(self, j: int) -> None:
        """Begin partition ``j``."""
        self.j, self.first = j, node_count()
        self._starts[j] = self.first
        self.earlier = range(min(self._starts.values()), self.first)
        self._step.ledger[self._i, j].find_reachable = partial(self._find_reachable, j)

    def end(self) -> None:
        """Note how many nodes the partition has made."""
        self._step.ledger[self._i, self.j].made = node_count() - self.first

    def enter_inputs(self, x: Value) -> Value:
        """Return the model's inputs with a graph that begins in partition 0."""
        xs, rebuild = differentiable(x)
        return rebuild(self._cross(None, xs, xs)) if xs else x

    def enter(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Return the boundary tensor, with the values of ``value``, of an earlier ``tensor``."""
        number = sequence_nr(tensor.grad_fn)
        origin = max(j for j, start in self._starts.items() if start <= number)
        (entered,) = self._cross(origin, (tensor,), (value,))
        return entered

    def _cross(self, origin: int | None, tensors: Tensors, values: Tensors) -> Tensors:
        entered = self._step.cross(self._i, self.j, origin, tensors, values)
        entered[0].grad_fn.mark = self._mark  # type: ignore[union-attr]
        return entered

    def _find_reachable(self, j: int, ends: list[Node]) -> Reachable:
        """Return what is behind the ends of partition ``j``.

        Raises:
            RuntimeError: a tensor has entered it unseen, through a custom autograd function,
                compiled code, a transform, an object or a closure. The graph is not cut there, and
                leads into that of an earlier partition, or of another micro-batch or call.
        """
        start = self._starts[j]
        end = min([first for k, first in self._starts.items() if k > j], default=_NEVER)
        reachable = find_leaves(ends, [order.ENTRANCE], range(start, end))
        is_entrance = map(is_, map(type, reachable.nodes), repeat(ENTERED))
        for node in compress(reachable.nodes, is_entrance):
            if getattr(node, "mark", self._mark) is not self._mark:
                raise RuntimeError(_KEPT)
        earlier = range(min(self._starts.values()), start)
        if any(sequence_nr(node) in earlier for node in reachable.others):
            raise RuntimeError(
                "a partition uses a tensor that an earlier one has made, where a step of a pipe "
                "does not see it (in a custom autograd function, in compiled code, in a transform "
                "of torch.func, in an object or a closure that a layer is given, or under another "
                "name, such as a view, after a change in place); pass "
                "tensor.clone(), or the tensor itself, or register the object's class "
                "(torch.utils._pytree.register_dataclass), or call the pipe and loss.backward()"
            )
        return reachable

    def refuse_going_back(self, outputs: Tensors, inputs: Tensors, brought: Tensors) -> None:
        """Refuse ``torch.autograd.grad`` that may lead through an earlier partition (forces, say).

        torch would return ``None`` (with ``allow_unused``), or part of a sum. If no inputs are
        given, the node at the cut itself raises an error.

        Args:
            outputs: the tensors to differentiate.
            inputs: the tensors to differentiate by. Parameters, and what this partition has made,
                do not lead back.
            brought: the boundary tensors that take their places, or themselves.
        """
        pairs = zip(inputs, brought, strict=True)
        if all([type(x) is nn.Parameter or x is y and not x.is_leaf for x, y in pairs]):
            return
        if ENTERED in map(type, find_leaves(_nodes(outputs), stop=_nodes(brought)).nodes):
            raise RuntimeError(
                "torch.autograd.grad or backward in a model's own code goes back into an "
                "earlier partition, or to the inputs of the model, which a step of a pipe can "
                "do only after the loss is computed; call the pipe and loss.backward(), or cut "
                "elsewhere"
            )


_NEVER = 1 << 62


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    """Return their nodes, except in a transform of torch.func, which has a graph of its own."""
    return [order.edge_of(x).node for x in tensors if x.requires_grad and not is_wrapped(x)]


_KEPT = (
    "the model uses a tensor with a graph that it has kept from another call or micro-batch, which "
    "forward_backward cannot go back through; detach it there, or call the pipe and "
    "loss.backward()"
)
