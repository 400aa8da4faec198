"""Checkpoint and Recompute: the paper's pair with shared memory (section 3.2.4).

The standard checkpoint is one autograd function that runs the forward without grad and, in its
backward, runs it again and differentiates the result. That ties recomputation to back-propagation,
but the pipeline needs ``R[i,j]`` to run while ``dy`` is in transit, and ``B[i,j]`` afterwards. So
the paper splits the function into two that share memory::

    xs, weights -> Checkpoint -> Wait -> Recompute -> Fork      and backward from right to left

*Recompute* computes the task again and leaves its graph in the shared memory, *Checkpoint*
differentiates that graph:

1. *Checkpoint* is a function of everything the graph of ``F[i,j]`` begins with: the inputs, and the
   leaves that a walk of the graph finds. So hooks on parameters, ``autograd.grad``, frozen layers
   and ``DistributedDataParallel`` see what they see without checkpointing: one gradient per
   micro-batch, which autograd sums.
2. Under ``create_graph`` *Checkpoint* computes the task once more, from inputs that are connected
   to the graph before it, so the gradients have a graph.
3. *Checkpoint* releases the inputs and the graph when its backward is over, unless the backward
   retains the graph. In that case the next backward recomputes.
4. Where a layer uses a tensor of a graph of the caller's, the task is not just a function of what
   its graph begins with; where a layer is not recomputed, there is no second graph of it. There the
   graph of ``F`` stays, and *Recompute* fills in its saved tensors (and see :func:`.origins`).
5. A layer may have kept a part of ``F``'s graph, such as a loss of its own. A backward from there
   reads a number in place of a saved tensor, and recomputes on the spot.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pipert._torch import keeps_graph, tensor_hooks, will_execute
from pipert._typing import Tensors, Value
from pipert.autograd.engine import applied, differentiate
from pipert.autograd.hooks import Hook, refuse
from pipert.autograd.leaves import origins
from pipert.autograd.recompute import Graph, Recomputation
from pipert.batch.tensors import describe

T = TypeVar("T")


class Whole(Protocol):
    """A group of checkpoints that are recomputed together, in one ``R[i,j]``."""

    def refill(self, on_worker: bool) -> None:
        """Compute all tasks of the group again."""

    def one(self, recomputation: Recomputation, compute: Callable[[], T]) -> T:
        """Run ``compute``, a ``recomputation`` of the group, as ``R[i,j]`` would."""


class Checkpoint:
    """The shared memory of one checkpointed task.

    Owned by the graph: by the *Checkpoint* node, or by the unpack hook of ``F``'s graph.

    Args:
        recomputation: computes the task again.
        whole: the group it is recomputed with, by :meth:`refill`; ``None`` if it is alone.
    """

    __slots__ = (
        "__weakref__", "_graph", "_is_pair", "_recomputation", "_recording", "_saved", "_whole",
        "_xs", "in_step",
    )  # fmt: skip

    def __init__(self, recomputation: Recomputation, whole: Whole | None = None) -> None:
        self._recomputation = recomputation
        self._whole = whole
        self._graph: Graph | None = None  # R's, until B
        self._saved: dict[int, tuple[Any, int]] = {}  # R's, if F's graph was kept
        self._xs: Tensors = ()
        self._is_pair = self._recording = False
        self.in_step: Callable[..., Sequence[Tensor | None]] | None = None
        """Differentiates the graph in ``B[i,j]`` of a step, which asks for all gradients."""

    def record(self, compute: Callable[[Value], Value], value: Value) -> Value:
        """Run ``compute(value)``, and replace its graph by one node if possible (rules 1 and 4)."""
        self._recording = True
        try:
            xs, begins, ys, rebuild, nodes = self._recomputation.first(compute, value, self._take)
        finally:
            self._recording = False
        found = origins(ys, begins, nodes) if ys and self._recomputation.is_whole else None
        if found is not None:
            leaves, has_functions = found
            self._is_pair, self._xs = True, self._recomputation.connections(xs)
            apply = _apply_around_functions if has_functions else _apply_checkpoint
            ys = apply(self, ys, *xs, *leaves)
        return rebuild(ys)

    def recompute(self) -> None:
        """Recompute what the imminent backward needs."""
        if self._is_pair and torch.is_grad_enabled():
            return  # the backward computes the task once more (rule 2)
        if self._whole is None:
            self.refill(False)
        elif self._graph is None if self._is_pair else not self._saved:
            self._whole.refill(False)

    def _one(self, compute: Callable[[], T]) -> T:
        return compute() if self._whole is None else self._whole.one(self._recomputation, compute)

    def refill(self, on_worker: bool) -> None:
        """Compute the task again, and keep what the next backward needs."""
        if self._is_pair:
            self._graph = self._recomputation.compute(on_worker)
        else:
            self._saved = self._recomputation.saved(on_worker)

    def begin_backward(self, differentiate: Callable[..., Sequence[Tensor | None]]) -> None:
        """Let ``B[i,j]`` of a step differentiate the graph of ``R[i,j]`` by this function."""
        self.in_step = differentiate

    def differentiate(self, dys: Sequence[Tensor | None], ctx: Any) -> list[Tensor | None]:
        """Return the needed gradients of inputs and leaves, given those of the outputs."""
        if self._graph is None:  # a second backward
            self.recompute()
        graph, self._graph = self._graph, None
        gate, create_graph = Gate(), torch.is_grad_enabled()
        if create_graph:
            connect = partial(connect_inputs, gate, self._xs)
            graph = self._one(lambda: self._recomputation.compute(False, connect))
        assert graph is not None
        pairs = [(y, dy) for y, dy in zip(graph.ys, dys, strict=True) if dy is not None]
        ys, given = zip(*pairs, strict=True)
        # A leaf frozen since the forward gets no gradient, as without checkpointing.
        needed = [True] * len(graph.xs) + [leaf.requires_grad for leaf in ctx.leaves]
        if self.in_step is None:
            asked_for = [_is_needed(node) for node, _ in ctx.next_functions]
            needed = [a and b for a, b in zip(needed, asked_for, strict=True)]
        wanted: list[Any] = [*compress((*graph.xs, *ctx.leaves), needed)]
        if self.in_step is not None and not create_graph:
            found = self.in_step(ys, wanted, given)
        else:
            found = _differentiate_partially(ctx.leaves, ys, wanted, given, create_graph)
        gate.is_open = True
        rest = iter(found)
        return [next(rest) if is_needed else None for is_needed in needed]

    def peek(self, number: int) -> Tensor | None:
        """Return the tensor that ``F`` saved as ``number``, if it is filled in and unchanged."""
        value, version = self._saved.get(number, (None, 0))
        is_tensor = value is not None and self._recomputation.hooks is None
        return value if is_tensor and value._version == version else None

    def _take(self, number: int) -> Tensor:
        """Return the tensor that ``F`` saved as ``number``, recomputing if necessary (rule 5)."""
        if number not in self._saved:
            if self._recording:
                refuse(number)
            if self._is_pair or self._whole is None:
                self._saved = self._one(lambda: self._recomputation.saved(False))
            else:
                self._whole.refill(False)
        value, version = self._saved.pop(number)
        if self._recomputation.hooks is not None:
            return self._recomputation.hooks[1](value)  # type: ignore[no-any-return]
        tensor: Tensor = value
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor needed for gradient computation, {describe(tensor)}, was modified in "
                "place by a later operation of the same partition; clone it there"
            )
        return tensor

    def __repr__(self) -> str:
        return f"<Checkpoint of {self._recomputation!r}>"


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, checkpoint: Checkpoint, ys: Tensors, *begins: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.checkpoint = checkpoint
        ctx.leaves = begins[len(checkpoint._xs) :]
        return tuple(map(Tensor.detach, ys))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.checkpoint is None:
            raise RuntimeError(_SECOND_TIME)
        if all(dy is None for dy in dys):
            return (None,) * len(ctx.needs_input_grad)
        found = ctx.checkpoint.differentiate(dys, ctx)
        if not keeps_graph():
            ctx.checkpoint = ctx.leaves = None
        return (None, None, *found)


class _CheckpointOfFunctions(_Checkpoint):
    """A *Checkpoint* of functions written in Python, whose backward may call the engine."""


def _is_needed(node: Any) -> bool:
    """Whether the current backward asks for the gradient that goes to this node."""
    try:
        return will_execute(node)
    except RuntimeError:  # torch does not answer for a leaf that autograd.grad asks for
        return True


class _Thread(threading.local):
    """The state of the current thread."""

    computes_partial_gradients = False
    """Whether it computes one task's part of each weight's gradient."""


_thread = _Thread()


class _HookOnSum:
    """A hook on a weight that is not called with partial gradients."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, gradient: Tensor) -> Tensor | None:
        return None if _thread.computes_partial_gradients else self._hook(gradient)


def _differentiate_partially(
    leaves: Tensors, ys: Any, wanted: Sequence[Any], dys: Any, create_graph: bool
) -> Sequence[Tensor | None]:
    """Differentiate one task's graph, of whose gradients the weights' hooks get to know nothing."""
    for leaf in leaves:
        if hooks := tensor_hooks(leaf):
            _hide_partial_gradients(hooks)
    before = _thread.computes_partial_gradients
    try:
        _thread.computes_partial_gradients = True
        return differentiate(ys, wanted, dys, create_graph=create_graph)
    finally:
        _thread.computes_partial_gradients = before  # no call, so no interrupt comes between


def _hide_partial_gradients(hooks: dict[int, Hook]) -> None:
    """Hide partial gradients from a weight's hooks, which are keyed by their handles' numbers."""
    for number, hook in list(hooks.items()):
        if not isinstance(hook, _HookOnSum):
            hooks[number] = _HookOnSum(hook)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, checkpoint: weakref.ref[Checkpoint], *ys: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.checkpoint = checkpoint
        return tuple(map(Tensor.detach, ys))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        checkpoint = ctx.checkpoint()
        if checkpoint is not None and any(grad is not None for grad in grads):
            checkpoint.recompute()
        return (None, *grads)


_apply_checkpoint, _apply_around_functions = applied(_Checkpoint), applied(_CheckpointOfFunctions)
_apply_recompute = applied(_Recompute)

_SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Specify retain_graph=True if you need to backward through the "
    "graph a second time"
)


def recompute_before(ys: Tensors, checkpoint: Checkpoint) -> Tensors:
    """Make the backward of ``ys``, which are all differentiable, recompute first."""
    weak = weakref.ref(checkpoint)
    outputs: Tensors = _apply_recompute(weak, *ys)
    return outputs


class Gate:
    """A switch for gradients that pass from a task to the graph before it. Closed at first."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False


class _Gate(torch.autograd.Function):
    """A connection of inputs that passes gradients when the gate is open.

    It opens when the task's gradients are known: the graph before the task may lead to the task's
    own leaves and inputs, such as a tied weight, and gradients along those paths are not this
    task's to compute.
    """

    @staticmethod
    def forward(ctx: Any, gate: Gate, values: Tensors, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.gate = gate
        return tuple(map(Tensor.detach, values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *grads) if ctx.gate.is_open else (None,) * (2 + len(grads))


def connect_inputs(gate: Gate, xs: Tensors, values: Tensors) -> Tensors:
    """Return ``values`` connected to the graph of ``xs`` through ``gate``."""
    connected: Tensors = _apply_gate(gate, values, *xs)
    return connected


_apply_gate = applied(_Gate)


class _Proxy(torch.autograd.Function):
    """A placeholder for a tensor in the graph, of the same shape, that takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.materialize_grads = False
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


proxy_of = applied(_Proxy)
"""``y = proxy_of(x)``: a differentiable placeholder for ``x`` that does not keep its data."""
