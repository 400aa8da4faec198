"""Brings tensors from partition to partition, wherever the model uses them.

Nothing lists what a partition passes to a later one: arguments of layers, but also whatever the
model's own code between its layers (for short, its own code) has kept in a variable. So tensors are
inspected when they are used: in the arguments of an intercepted call, and in those of each torch
function that its own code calls. One thread makes and numbers all nodes of a micro-batch (but see
rules 2 and 3 of ``autograd.leaves``). So a tensor whose node has a lower number than those of the
current partition was made by an earlier one, and *enters* the current one:

* In a step the graph is cut there. A *boundary tensor* is used, with the tensor's values but not
  its graph; ``B[i,j]`` keeps its gradient for the ``B`` of the partition that made the tensor.
* If it is on another device, it is copied over the copy streams of both devices; in a call, inside
  the graph.

A tensor enters a partition once, however often it is used there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from pipert._torch import node_count, sequence_nr
from pipert._typing import Tensors, Value
from pipert.any_model.boundary_tensors import BoundaryTensors, refuse_old_base
from pipert.any_model.checkpointed_calls import CheckpointedCalls
from pipert.any_model.func_transforms import outside_of_transforms, refuse_to_cut
from pipert.any_model.function_mode import DEVICE_METADATA, GRADIENT_REQUESTS, METADATA
from pipert.any_model.hooks_on_arguments import GradientHooks, hooks_for
from pipert.any_model.inner_gradients import refuse_going_back
from pipert.any_model.map_tensors import map_tensors
from pipert.any_model.tensor_copies import TensorCopies
from pipert.autograd import order
from pipert.autograd.order import ENTERED
from pipert.autograd.recompute import edges_of
from pipert.batch.tensors import differentiable, tensors_of
from pipert.stage.stage import Stage
from pipert.workers.context import is_transformed

__all__: list[str] = []


@dataclass(slots=True, eq=False)
class SourceTensor:
    """A tensor that later partitions use, and the gradients that they have sent back."""

    edge: GradientEdge | None
    """The tensor's place in the graph; ``None`` for an input of the model."""
    hooks: GradientHooks | None = None
    """The hooks of its boundary tensors."""
    gradients: list[tuple[Tensor, int]] = field(default_factory=list)
    """Each with the partition that sent it."""


class PartitionGraph:
    """The record of ``F[i,j]`` that ``B[i,j]`` needs."""

    __slots__ = ("entries", "first", "last", "loss", "sources")

    def __init__(self, first: int) -> None:
        self.first = self.last = first
        """The nodes of the part are numbered ``range(first, last)``."""
        self.entries: list[tuple[GradientEdge, SourceTensor]] = []
        """The edge at which each tensor of an earlier partition entered, and its source."""
        self.sources: dict[tuple[Node, int], SourceTensor] = {}
        """The tensors made in the part and used by later ones, by place in the graph."""
        self.loss: Tensor | None = None


class Intercept(TorchFunctionMode):
    """A function mode that brings tensors to where one micro-batch is.

    Used by the thread of the micro-batch, and later by the workers that carry out its ``B[i,j]``.

    Args:
        cuts: whether the graph is cut, as in a step.
        moves: brings tensors to other devices; ``None`` if all devices are the CPU.
        parameter_copy: returns a parameter's copy, or itself; ``None`` if no parameter has one.
    """

    def __init__(
        self,
        cuts: bool,
        moves: TensorCopies | None,
        parameter_copy: Callable[[nn.Parameter], Tensor] | None,
    ) -> None:
        super().__init__()
        self._moves = moves
        self._parameter_copy = parameter_copy
        self._not_inspected = METADATA if moves is None else METADATA - DEVICE_METADATA
        self.parts: dict[int, PartitionGraph] = {}
        self._cuts = cuts
        self._starts: list[int] = []  # the number of the first node of each partition entered
        self._order: list[int] = []  # the partitions entered
        self._start = 0
        self._part: PartitionGraph = PartitionGraph(0)
        self._boundary = BoundaryTensors()
        self.is_on = True
        self.mark = object()
        """Marks the nodes at which partitions' graphs begin as this micro-batch's."""

    def begin(self, stage: Stage, calls: CheckpointedCalls | None) -> None:
        """Begin a partition whose calls of layers are recorded on ``calls``."""
        self._start = node_count()
        self._part = self.parts[stage.place.j] = PartitionGraph(self._start)
        self._starts.append(self._start)
        self._order.append(stage.place.j)
        if self._moves is not None:
            self._moves.begin(stage, calls)

    def end(self) -> None:
        """End the partition: its boundary tensors are not used again."""
        self._part.last = node_count()
        self._part = PartitionGraph(0)
        self._boundary.end(self._start)
        if self._moves is not None:
            self._moves.end()

    def enter_inputs(self, x: Value) -> Value:
        """Bring the inputs of the model into partition 0."""
        if self._moves is not None:
            x = self._moves.enter_inputs(x)
        xs, rebuild = differentiable(x)
        if not xs or not self._cuts:
            return x
        entered = self._mark(order.enter(xs))
        self._part.entries += [(edge, SourceTensor(None)) for edge in edges_of(entered)]
        return rebuild(entered)

    def bring_all(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a call with each tensor brought into the current partition."""
        brought = tuple([map_tensors(value, self.bring) for value in args])
        return brought, {name: map_tensors(value, self.bring) for name, value in kwargs.items()}

    def bring(self, tensor: Tensor) -> Tensor:
        """Return the tensor to use for ``tensor`` in the current partition."""
        if self._parameter_copy is not None and isinstance(tensor, nn.Parameter):
            return self._parameter_copy(tensor)
        if not self._cuts:
            return self._on_device(tensor)
        node = tensor.grad_fn
        if node is not None:
            number = sequence_nr(node)
            if number >= self._start:
                if tensor._is_view():
                    refuse_old_base(tensor, range(self._starts[0], self._start))
            elif number >= self._starts[0]:  # else the caller made it
                return self._at_boundary(tensor, node, number)
        return tensor if self._moves is None else self._with_its_graph(tensor)

    def _at_boundary(self, tensor: Tensor, node: Node, number: int) -> Tensor:
        """Return the boundary tensor for a tensor of another partition, by its node's number."""
        key = node, tensor.output_nr
        entered = self._boundary.find(key)
        if entered is not None:
            return entered
        if (changed := self._boundary.changed(key)) is not None:
            return self.bring(changed)
        if is_transformed():
            refuse_to_cut(tensor)
            with outside_of_transforms():
                return self._at_boundary(tensor, node, number)
        self._boundary.refuse_stale(tensor, number)
        entered = self._enter(tensor, key, self._made_in(number))
        self._boundary.add(key, tensor, entered)
        return entered

    def _enter(self, tensor: Tensor, key: tuple[Node, int], made_in: PartitionGraph) -> Tensor:
        source = made_in.sources.get(key)
        if source is None:
            source = made_in.sources[key] = SourceTensor(order.edge_of(tensor), hooks_for(tensor))
        with torch.enable_grad():  # the model may use it again with gradients enabled
            (entered,) = self._mark(order.enter((self._on_device(tensor),)))
        self._part.entries.append((order.edge_of(entered), source))
        assert source.hooks is not None
        source.hooks.give(entered)
        return entered

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the partition's device. In a step a copy has no graph."""
        moves = self._moves
        if moves is None:
            return tensor
        tensor = moves.current(tensor)
        return moves.bring(tensor) if moves.is_elsewhere(tensor) else tensor

    def _with_its_graph(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, made by no earlier partition, on the current device with its graph."""
        moves = self._moves
        if moves is None or not tensor.requires_grad or not moves.is_elsewhere(tensor):
            return self._on_device(tensor)
        return moves.bring_in_graph(tensor)

    def _with_whole_gradient(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose gradient is summed over all partitions, not a boundary tensor."""
        if self._cuts:
            return self._boundary.latest(tensor)
        return tensor if self._moves is None else self._moves.latest(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # once for all micro-batches: nothing enters
            return func(*args, **kwargs or {})
        if func in self._not_inspected or not self.is_on:
            return func(*args, **kwargs or {})
        if func in GRADIENT_REQUESTS:
            prepare = self._to_retain if func is Tensor.retain_grad else self._to_go_back
            args, kwargs = prepare(*args, **kwargs or {})
        else:
            args, kwargs = self.bring_all(args, kwargs or {})
        result = func(*args, **kwargs)
        self.settle(result)
        return result

    def _to_retain(self, tensor: Tensor) -> Any:
        """Return the arguments of ``retain_grad``, with the tensor that gets the whole gradient."""
        find = self.bring if isinstance(tensor, nn.Parameter) else self._with_whole_gradient
        return (find(tensor),), {}

    def _to_go_back(self, outputs: Any, inputs: Any = None, **kwargs: Any) -> Any:
        """Return the arguments of a backward, with ``inputs`` that its graph contains."""
        if self._cuts:
            entries = [entry for part in self.parts.values() for entry in part.entries]
            cut = {edge.node: source.edge for edge, source in entries}
            by = None if inputs is None else tensors_of(inputs)[0]
            refuse_going_back(tensors_of(outputs)[0], by, self.bring, cut)
        inputs = map_tensors(inputs, self.bring if self._cuts else self._with_whole_gradient)
        (outputs,), kwargs = self.bring_all((outputs,), kwargs)
        return (outputs,), {**kwargs, "inputs": inputs}

    def settle(self, value: Value) -> None:
        """Let other partitions copy ``value``, which was just computed, on whatever device."""
        if self._moves is not None:
            self._moves.settle(value)

    def finish(self, loss: Tensor | None) -> None:
        """Keep the loss, computed at the end of the last partition."""
        self._part.loss = loss

    def _mark(self, entered: Tensors) -> Tensors:
        entered[0].grad_fn.mark = self.mark  # type: ignore[union-attr]
        return entered

    def enter_unseen(
        self, part: PartitionGraph, others: Sequence[Node], nodes: set[Node]
    ) -> list[GradientEdge]:
        """Cut the graph where tensors of earlier partitions have entered unseen.

        They do so through custom autograd functions, compiled code, objects and closures.

        Args:
            part: the part to go backward.
            others: the nodes of its graph that were not made in it.
            nodes: all nodes of its graph.

        Returns:
            The edges where the graph is now cut; they are added to the entries of the part.

        Raises:
            RuntimeError: the graph leads into that of another micro-batch or call, or the boundary
                tensor for such a tensor was changed in place.
        """
        for node in nodes:
            if type(node) is ENTERED and getattr(node, "mark", self.mark) is not self.mark:
                raise RuntimeError(_KEPT)
        numbers = range(self._starts[0], part.first)
        earlier = {node for node in others if sequence_nr(node) in numbers}
        edges: dict[tuple[Any, int], None] = {}
        for node in nodes - earlier - {None} if earlier else ():
            for key in node.next_functions:
                if key[0] in earlier:
                    self._boundary.refuse_unseen(key, node)  # type: ignore[arg-type]
                    edges[key] = None
        found = []
        for place in edges:
            edge, sources = GradientEdge(*place), self._made_in(sequence_nr(place[0])).sources
            found.append((edge, sources.setdefault(place, SourceTensor(edge))))
        part.entries += found
        return [edge for edge, _ in found]

    def _made_in(self, number: int) -> PartitionGraph:
        """Return the part in which the node with this number was made."""
        return self.parts[self._order[bisect_right(self._starts, number) - 1]]


_KEPT = (
    "the model uses a tensor with a graph that it has kept from another call or micro-batch, which "
    "forward_backward cannot go back through; detach it there, or call the pipe and "
    "loss.backward()"
)
