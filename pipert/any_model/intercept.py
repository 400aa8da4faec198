"""Brings tensors from partition to partition, wherever the model uses them.

Nothing lists what a partition passes to a later one: arguments of layers, but also whatever the
model's own code between its layers (for short, its own code) has kept in a variable. So tensors are
inspected when they are used: in the arguments of an intercepted call, and in those of each torch
function that its own code calls. A *boundary tensor* takes the place of one

* that an earlier partition has made, in a step: the graph is cut there (``microbatch_graph``);
* that is on the device of another partition: it is copied.

A tensor enters a partition once, however often it is used there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._torch import (
    LEFT_ALIGNED,
    function_mode_at,
    function_mode_count,
    node_count,
    pop_function_mode,
    push_function_mode,
    sequence_nr,
    transforms,
)
from pipert._typing import Value
from pipert.any_model.microbatch_graph import BoundaryTensors, MicroBatchGraph
from pipert.autograd import order, streams, transfer
from pipert.batch.tensors import describe, map_each, map_tensors, tensors_of
from pipert.recompute.nodes import recompute_before
from pipert.recompute.segment import Segments
from pipert.stage.run import Run
from pipert.stage.stage import Stage

_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "layout", "requires_grad", "grad_fn", "is_leaf", "ndim", "output_nr",
        "_version", "is_sparse", "is_quantized", "is_meta", "is_nested", "is_mkldnn",
        "retains_grad", "nbytes", "itemsize",
    )
) | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.__len__, Tensor.is_contiguous, Tensor.is_inference,
}  # fmt: skip
"""Functions whose result is the same on each device and in each graph, so they need no tensors."""

_GRADIENT_REQUESTS = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""Functions that run a backward at once."""

_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]

_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})
"""Functions that ask for the gradient of a tensor, when there is one."""


class TensorCopies:
    """Copies tensors of micro-batch ``i`` to the device of the current partition.

    A tensor that partition *j* uses, and that is on the device of another partition *k*, is copied
    once for partition *j*, over the copy streams of both devices (section 3.2.3 of the paper):

    * In a call the copy is part of the graph. In the backward, ``B[i,k]`` begins after the gradient
      has been copied back, so a fork there takes the turn of the micro-batch (``autograd.order``).
    * If *k* is the partition before, it recomputes first, while the gradient is still being copied.
      A tensor that skips partitions triggers no recomputation: its gradient may arrive long before.
    * When a partition ends, the copy stream of its device waits for what it has computed, so a copy
      waits for that and not for what the device computes later.

    Parameters are copied once per run and partition (``parameter_copies``). A tensor that is on no
    device of the pipe, such as lengths on the CPU, stays there.
    """

    def __init__(self, i: int, run: Run) -> None:
        self._i = i
        self._run = run
        self._devices = list(dict.fromkeys(run.devices))
        self._stage: Stage
        self._start = 0
        self._nodes_before = range(0)  # the numbers of the nodes of the partition before
        self._segments_before: weakref.ref[Segments] | None = None  # of the partition before

    def begin(self, stage: Stage) -> None:
        """Begin a partition."""
        self._stage = stage
        self._nodes_before, self._start = range(self._start, node_count()), node_count()

    def end(self, segments: Segments | None) -> None:
        """End the partition, whose calls of layers may have been checkpointed."""
        self._segments_before = None if segments is None else weakref.ref(segments)
        if len(self._devices) > 1:
            self._stage.boundary.copies.let_others_copy(self._i)

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the device of another partition, to be copied here."""
        device = tensor.device
        if device == self._stage.place.device or device not in self._devices:
            return False
        # 0-dimensional CPU tensors, such as a length, work with tensors of any device.
        return device.type != "cpu" or tensor.dim() > 0

    def enter_inputs(self, x: Value) -> Value:
        """Bring the inputs of the model to its first device."""
        with torch.enable_grad():
            return self._stage.boundary.copies.bring(self._i, x, None)

    def copy(self, tensor: Tensor, is_cut: bool) -> Tensor:
        """Return a copy of ``tensor``, without a graph if the graph ``is_cut`` there."""
        if is_cut:
            tensor = tensor.detach()
        elif tensor.requires_grad and self._stage.step_boundary is not None:
            # No partition has made it.
            return tensor.to(self._stage.place.device)
        elif tensor.requires_grad:
            tensor = self._order_backward(tensor)
        origin = self._run.devices.index(tensor.device)
        (moved,) = self._stage.boundary.copies.bring(self._i, (tensor,), origin)
        found: Tensor = moved
        return found

    def settle(self, value: Value) -> None:
        """Let other partitions copy tensors that this one has made on another device."""
        for tensor in tensors_of(value)[0]:
            if self.is_elsewhere(tensor):
                source = self._run.streams.get(tensor.device, self._i)
                streams.wait(source, streams.compute_stream(tensor.device))

    def _order_backward(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` behind nodes that order the backward around the copy's."""
        copying = self._run.streams.get(tensor.device, self._i)
        compute = streams.compute_stream(tensor.device)
        number = -1 if tensor.grad_fn is None else sequence_nr(tensor.grad_fn)
        (tensor,) = transfer.wait((tensor,), copying, compute, now=False)
        segments = None if self._segments_before is None else self._segments_before()
        # A node of another thread, which a model has kept, would at most recompute early.
        if segments is not None and number in self._nodes_before:
            (tensor,) = recompute_before((tensor,), segments)
        # In the backward the fork comes first, so nothing waits for a gradient before its turn.
        _, tensor = order.fork(self._i, None, tensor)
        return tensor


class Intercept(TorchFunctionMode):
    """A function mode that brings tensors to where one micro-batch is.

    Args:
        graph: the micro-batch's graph in a step; ``None`` in a call, whose graph is not cut.
        copies: copies tensors from other devices; ``None`` if all devices are the CPU.
        copy_of: returns a parameter's copy, or itself; ``None`` if no parameter has one.
    """

    is_of_pipe = True  # tells another pipe that runs in here that this mode is not for it

    def __init__(
        self,
        graph: MicroBatchGraph | None,
        copies: TensorCopies | None,
        copy_of: Callable[[nn.Parameter], Tensor] | None,
    ) -> None:
        super().__init__()
        self._graph = graph
        self._copies = copies
        self._copy_of = copy_of
        self.boundary = BoundaryTensors(cuts=graph is not None)
        self.is_on = True

    def enter_inputs(self, x: Value) -> Value:
        """Bring the inputs of the model into partition 0."""
        if self._copies is not None:
            x = self._copies.enter_inputs(x)
        return x if self._graph is None else self._graph.enter_inputs(x)

    def bring_all(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a call with each tensor brought into the current partition."""
        brought = tuple(map_each(args, self.bring))
        if kwargs:
            kwargs = dict(zip(kwargs, map_each(kwargs.values(), self.bring), strict=True))
        return brought, kwargs

    def bring(self, tensor: Tensor) -> Tensor:
        """Return the tensor to use for ``tensor`` in the current partition."""
        is_plain = type(tensor) is Tensor  # to ask for a parameter's class is a call in Python
        if not is_plain and self._copy_of is not None and isinstance(tensor, nn.Parameter):
            return self._copy_of(tensor)
        if self.boundary.changed:
            tensor = self.boundary.as_left(tensor)
        is_earlier, graph = False, self._graph
        if graph is not None and (node := tensor.grad_fn) is not None:
            # Else this partition made it, or the caller.
            is_earlier = sequence_nr(node) in graph.earlier
        is_elsewhere = self._copies is not None and self._copies.is_elsewhere(tensor)
        if not (is_earlier or is_elsewhere):
            return tensor
        entered = self.boundary.find(tensor)
        if entered is None:
            if transforms():
                raise RuntimeError(_TRANSFORMED.format(describe(tensor), tensor.device))
            entered = self._enter(tensor, is_earlier)
            self.boundary.add(tensor, entered)
        return entered

    def _enter(self, tensor: Tensor, is_earlier: bool) -> Tensor:
        # Enables gradients: the model may use it again in a block that enables them.
        with torch.inference_mode(tensor.is_inference()):
            value = tensor
            if self._copies is not None and self._copies.is_elsewhere(tensor):
                value = self._copies.copy(tensor, is_cut=is_earlier)
            if self._graph is None or not is_earlier:
                return value
            return self._graph.enter(tensor, value)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # once for all micro-batches: nothing enters
            return func(*args, **kwargs)
        if func in _METADATA or not self.is_on:
            return func(*args, **kwargs)
        if func in _HOOKS:
            args = (self.boundary.with_whole_gradient(args[0]), *args[1:])
        elif func in _GRADIENT_REQUESTS:
            args, kwargs = self._to_go_back(*args, **kwargs)
        elif func == _SET_DATA and self.bring(args[0]) is not args[0]:
            raise RuntimeError(CHANGED)
        elif func == _DATA and args[0].is_leaf and id(args[0]) not in self.boundary.changed:
            pass  # what is changed through it is brought by itself
        else:
            args, kwargs = self.bring_all(args, kwargs)
        result = func(*args, **kwargs)
        if result is True and func is LEFT_ALIGNED:
            may_go_back = torch.is_grad_enabled() and args[0].requires_grad
            if not (may_go_back or torch.is_autocast_enabled()):
                raise RuntimeError(_WITHOUT_FAST_PATH)
        if self._copies is not None:
            self._copies.settle(result)
        return result

    def _to_go_back(self, outputs: Any, inputs: Any = None, **kwargs: Any) -> Any:
        """Return the arguments of a backward, with ``inputs`` that its graph contains."""
        find = self.boundary.with_whole_gradient if self._graph is None else self.bring
        originals = tensors_of(inputs)[0]
        inputs = map_tensors(inputs, find)
        (outputs,), kwargs = self.bring_all((outputs,), kwargs)
        if self._graph is not None and inputs is not None:
            brought = tensors_of(inputs)[0]
            self._graph.refuse_going_back(tensors_of(outputs)[0], originals, brought)
        return (outputs,), {**kwargs, "inputs": inputs}


class Paused:
    """A block in which a mode inspects nothing. A class for speed: each call enters one."""

    __slots__ = ("_mode", "_was_on", "_was_on_top")

    def __init__(self, mode: Intercept) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        count = function_mode_count()
        self._was_on_top = count > 0 and function_mode_at(count - 1) is self._mode
        if self._was_on_top:
            pop_function_mode()
        else:
            self._was_on, self._mode.is_on = self._mode.is_on, False

    def __exit__(self, *_: object) -> None:
        if self._was_on_top:
            push_function_mode(self._mode)
        else:
            self._mode.is_on = self._was_on


CHANGED = (
    "a model's own code changes a parameter or buffer in place that lives on the device of another "
    "partition: it would change a copy, and be lost. Change it in a layer, or once per mini-batch, "
    "outside of forward, such as after optimizer.step()"
)
_WITHOUT_FAST_PATH = (
    "an nn.TransformerEncoder in eval(), which sets its outputs at padding to 0, cannot do so where"
    " a cut is inside of one of its layers, or its class has a forward of its own; make it with "
    "enable_nested_tensor=False"
)
_TRANSFORMED = (
    "a transform such as torch.func.vmap in a model's own code uses a tensor of an earlier "
    "partition, or of another device ({} on {}); give it tensor.clone(), made before the transform "
    "in the partition that uses it. A torch.func.grad through layers of more than one partition "
    "needs other cuts, or a call of the pipe and loss.backward()"
)
