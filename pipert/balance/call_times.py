"""Times the blocks of a model, each from the first call of its module to that of the next block's.

The standard way is to run the model with hooks that read the clock. That takes a device with room
for the whole model, and then there would be no need for a pipeline. So the model's own forward
runs, but each *layer* that it calls is computed by a copy on the device, made for this call, and
measured by itself, forward and then backward. The model continues with its detached output.

1. A *block* begins with the first call of its module. All measured time belongs to the current
   block, including repeated calls of earlier layers and the model's own code between layers. Time
   before the first block belongs to the first block.
2. The backward of a layer starts from ones for its output and ends at its parameters and those
   arguments that need a gradient. There is none if its output needs no gradient, as under
   ``no_grad``.
3. The model's own code has a graph of its own, which begins at the detached outputs of the layers.
   Its backward runs once, at the end. torch numbers the nodes of a thread in the order in which
   they are made, and one thread makes them all, so the number of a node tells its block.
4. The model may be on other devices. The layers' copies are on the measuring device, and every
   tensor that an operation of the model's own code uses is brought there.

Each call of a layer computes once, since its arguments may remember it, as a cache of keys and
values does. So there is no call to warm up: callers should ignore the first round.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._torch import node_count, sequence_nr
from pipert._typing import Value
from pipert.autograd.hooks import without_hooks
from pipert.balance.by_time import now
from pipert.balance.probe import copied
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import differentiable, tensors_of
from pipert.model.calls import call_model, intercepted, settled, unchanged

__all__: list[str] = []


def block_times(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    begins: Collection[str],
    example: Arguments,
    device: torch.device,
) -> dict[str, float]:
    """Return the seconds of each block, by the name of its layer, in the order of first calls.

    Parameters, gradients, buffers and torch's random state stay unchanged. Hooks of modules run,
    except backward hooks.

    Args:
        model: the model, on any device, in the mode to measure.
        layers: its layers by name.
        begins: the names of the layers that begin a block.
        example: the arguments of one micro-batch.
        device: where to measure.
    """
    state = (*model.parameters(), *model.buffers())
    gathering = _Gathering(device, state)
    trial = _Trial(layers, begins, device, gathering)
    elsewhere = any(tensor.device != device for tensor in state)
    with (
        unchanged(model, device),
        torch.inference_mode(False),
        torch.enable_grad(),
        intercepted(layers.values(), trial),
    ):
        args, kwargs = trial.inputs(example)
        with gathering if elsewhere else contextlib.nullcontext():
            trial.start_clock()
            output = call_model(model, args, kwargs)
            trial.stop_clock()
        trial.run_own_backward(output, gathering.copies if elsewhere else state)
    return trial.seconds()


class _Trial:
    """One forward of the model, and its backward piece by piece."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        begins: Collection[str],
        device: torch.device,
        gathering: _Gathering,
    ) -> None:
        self._names = {layer: name for name, layer in layers.items()}
        self._begins = begins
        self._device = device
        self._gathering = gathering
        self._seconds: dict[str | None, float] = {None: 0.0}
        self._block: str | None = None
        """The current block; ``None`` before the first."""
        self._started = 0.0
        self._marks: list[tuple[int, str | None]] = [(0, None)]
        """Numbers of nodes, each with the block of the nodes from there on (rule 3)."""
        self._leaves: list[Tensor] = []
        """Where the graph of the model's own code begins: its inputs and the layers' outputs."""
        self._roots: list[Tensor] = []
        """Where that graph ends: the layers' arguments and the model's output."""
        self._output_nodes: set[Any] = {None}
        """Nodes of the layers' outputs, and leaves' ``None``: no roots if passed on unchanged."""

    def inputs(self, example: Arguments) -> Arguments:
        """Return the model's arguments on the device."""
        arguments: Arguments = settled(example, self._device)
        self._leaves += differentiable(arguments)[0]
        return arguments

    def start_clock(self) -> None:
        """Start to measure time."""
        self._started = now(self._device)

    def stop_clock(self) -> None:
        """Add the measured time to the current block's."""
        self._seconds[self._block] += now(self._device) - self._started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each block (rule 1)."""
        found = {name: seconds for name, seconds in self._seconds.items() if name is not None}
        for name in list(found)[:1]:
            found[name] += self._seconds[None]
        return found

    def call(self, module: nn.Module, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Measure a copy of a layer, and return its detached output."""
        name = self._names.get(module)
        if name is None:  # a layer inside a pipe
            return call(*args, **kwargs)
        self.stop_clock()
        if name in self._begins and name not in self._seconds:
            self._block = name
            self._seconds[name] = 0.0
        try:
            with self._gathering.paused(), without_hooks():  # those of a checkpoint around layers
                output = self._measure(module, Arguments(args, kwargs))
        except Exception as error:
            error.add_note(f"while layer {name!r} ({type(module).__qualname__}) was measured")
            raise
        # The number of the next node that is made on this thread.
        self._marks.append((node_count(), self._block))
        output = self._detached(output)
        self.start_clock()
        return output

    def _measure(self, layer: nn.Module, arguments: Arguments) -> Value:
        self._note_roots(arguments)
        args, kwargs = inputs = _cloned(settled(arguments, self._device))
        copy = copied(layer, self._device, hooked=True)
        self.start_clock()
        output = copy(*args, **kwargs)
        self.stop_clock()
        roots, _ = differentiable(output)
        wanted = [*differentiable(inputs)[0], *[p for p in copy.parameters() if p.requires_grad]]
        self._backward(roots, wanted)
        torch.clear_autocast_cache()  # it would keep the copy alive
        return output

    def _backward(self, roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        if roots and wanted:
            ones = [torch.ones_like(root) for root in roots]
            self.start_clock()
            # Only to these: a cache may lead to other layers, whose backward has already run.
            torch.autograd.grad(roots, wanted, ones, allow_unused=True)
            self.stop_clock()

    def _detached(self, output: Value) -> Value:
        """Return a layer's output cut from its graph: no leaves, so that it may change in place."""
        tensors, rebuild = tensors_of(output)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        cloned = _cloned(tuple(leaves))
        self._leaves += [leaf for leaf in leaves if leaf.requires_grad]
        self._output_nodes |= {tensor.grad_fn for tensor in cloned}
        return rebuild(cloned)

    def _note_roots(self, value: Value) -> None:
        self._roots += [t for t in differentiable(value)[0] if t.grad_fn not in self._output_nodes]

    def run_own_backward(self, output: Value, state: Iterable[Tensor]) -> None:
        """Measure the backward of the model's own code, from its output to its ``state``."""
        self._note_roots(output)
        # Hooks of parameters must only see gradients that count.
        parameters = [p for p in state if p.requires_grad and not p._backward_hooks]
        for node in _nodes([root.grad_fn for root in self._roots]):
            k = bisect_right(self._marks, sequence_nr(node), key=itemgetter(0)) - 1
            node.register_prehook(partial(self._enter_block, self._marks[k][1]))
        self._backward(self._roots, [*self._leaves, *parameters])

    def _enter_block(self, block: str | None, grads: Any) -> None:
        """Switch the clock to ``block``, one of whose nodes is about to run."""
        if block != self._block:
            self.stop_clock()
            self._block = block
            self.start_clock()


def _cloned(value: Value) -> Value:
    """Return ``value`` with each tensor that requires grad cloned, so that it is no leaf."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([tensor.clone() for tensor in tensors]))


def _nodes(roots: Sequence[Any]) -> set[Any]:
    """Return the nodes of a graph except its leaves, which have no number."""
    found: set[Any] = set()
    left = list(roots)
    while left:
        node = left.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found.add(node)
            left.extend(following for following, _ in node.next_functions)
    return found


class _Gathering(TorchFunctionMode):
    """Brings the tensors of each operation to a device, and those of the model once (rule 4)."""

    def __init__(self, device: torch.device, state: Iterable[Tensor]) -> None:
        super().__init__()
        self._device = device
        self._state = {id(tensor) for tensor in state}
        self._copies: dict[int, Tensor] = {}
        self._is_paused = False

    @property
    def copies(self) -> Iterable[Tensor]:
        """The copies made so far of the model's own tensors."""
        return self._copies.values()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the tensors of operations where they are."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_paused:
            return func(*args, **kwargs or {})
        return func(*self._bring(args), **self._bring(kwargs or {}))

    def _bring(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device == self._device else self._copy(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._bring, value))
        if type(value) is dict:
            return {key: self._bring(item) for key, item in value.items()}
        return value

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._state:
            return tensor.to(self._device)
        if id(tensor) not in self._copies:
            copy = tensor.detach().to(self._device).requires_grad_(tensor.requires_grad)
            self._copies[id(tensor)] = copy
        return self._copies[id(tensor)]
