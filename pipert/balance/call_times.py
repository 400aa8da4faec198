"""Times what a model does from the first call of one module to that of the next.

The standard way is to run the model with hooks that read the clock. That takes a device with room
for all of it, which is what a pipeline is for. So its own forward runs, but each *layer* that it
calls is computed by a copy on the device, made for this call, and measured by itself, forward and
then backward; what goes on is its output without the graph.

1. A *block* begins with the first call of its module. What is measured belongs to the block that is
   current: also a layer that is called again, and code of the model itself between layers. What
   comes before the first block belongs to that.
2. The backward of a layer is that of ones for its output, to its parameters and those arguments
   that need a gradient. If its output needs none, or it is called under ``no_grad``, it has none.
3. The model's own code has a graph of its own, which begins where the layers' outputs were cut off.
   It goes backward at the end, once for all. Nodes are numbered by torch in the order in which
   they were made, so their number says whose block they belong to.
4. The model may be elsewhere than the device. The layers' copies are on it; to operations of the
   model's own code every tensor is brought.

Each layer computes once for each of its calls, since its arguments may remember it, as a cache of
keys and values does. So there is no call to warm up: let the first round not count.
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
    except those of a backward.

    Args:
        model: the model, anywhere, in the mode to measure.
        layers: its layers by name.
        begins: the names of those that begin a block.
        example: the arguments of one micro-batch.
        device: where to measure.
    """
    own = (*model.parameters(), *model.buffers())
    gathering = _Gathering(device, own)
    trial = _Trial(layers, begins, device, gathering)
    elsewhere = any(tensor.device != device for tensor in own)
    with (
        unchanged(model, device),
        torch.inference_mode(False),
        torch.enable_grad(),
        intercepted(layers.values(), trial),
    ):
        args, kwargs = trial.inputs(example)
        with gathering if elsewhere else contextlib.nullcontext():
            trial.resume()
            output = call_model(model, args, kwargs)
            trial.charge()
        trial.go_back(output, gathering.copies if elsewhere else own)
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
        self._current: str | None = None
        """The current block; none before the first."""
        self._resumed = 0.0
        self._marks: list[tuple[int, str | None]] = [(0, None)]
        """From which number on nodes belong to which block (rule 3)."""
        self._leaves: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._cut: set[Any] = {None}
        """The nodes of what layers return: code that hands it on has done nothing with it."""

    def inputs(self, example: Arguments) -> Arguments:
        """Return the arguments on the device."""
        found: Arguments = settled(example, self._device)
        self._leaves += differentiable(found)[0]
        return found

    def resume(self) -> None:
        """Let the time of the model's own code begin."""
        self._resumed = now(self._device)

    def charge(self) -> None:
        """Let it end, for the current block."""
        self._seconds[self._current] += now(self._device) - self._resumed

    def seconds(self) -> dict[str, float]:
        """Return those of each block (rule 1)."""
        early = self._seconds[None]
        found = {name: seconds for name, seconds in self._seconds.items() if name is not None}
        for name in list(found)[:1]:
            found[name] += early
        return found

    def call(self, module: nn.Module, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Measure a layer by a copy, and return what it does."""
        name = self._names.get(module)
        if name is None:  # one of a pipe
            return call(*args, **kwargs)
        self.charge()
        if name in self._begins and name not in self._seconds:
            self._current = name
            self._seconds[name] = 0.0
        try:
            with self._gathering.paused(), without_hooks():  # of a checkpoint around layers
                output = self._measure(module, Arguments(args, kwargs))
        except Exception as error:
            error.add_note(f"while layer {name!r} ({type(module).__qualname__}) was measured")
            raise
        self._marks.append((_next_number(), self._current))
        output = self._cut_off(output)
        self.resume()
        return output

    def _measure(self, layer: nn.Module, arguments: Arguments) -> Value:
        self._note_roots(arguments)
        args, kwargs = inputs = _fresh(settled(arguments, self._device))
        copy = copied(layer, self._device, hooked=True)
        self.resume()
        output = copy(*args, **kwargs)
        self.charge()
        roots, _ = differentiable(output)
        wanted = [*differentiable(inputs)[0], *[p for p in copy.parameters() if p.requires_grad]]
        self._backward(roots, wanted)
        torch.clear_autocast_cache()  # it would keep the copy alive
        return output

    def _backward(self, roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        if roots and wanted:
            ones = [torch.ones_like(root) for root in roots]
            self.resume()
            # To these alone: a cache may lead to other layers, which have gone backward before.
            torch.autograd.grad(roots, wanted, ones, allow_unused=True)
            self.charge()

    def _cut_off(self, output: Value) -> Value:
        """The output of a layer without its graph, as a leaf cannot be changed in place: a copy."""
        tensors, rebuild = tensors_of(output)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        cut = _fresh(tuple(leaves))
        self._leaves += [leaf for leaf in leaves if leaf.requires_grad]
        self._cut |= {tensor.grad_fn for tensor in cut}
        return rebuild(cut)

    def _note_roots(self, value: Value) -> None:
        self._roots += [t for t in differentiable(value)[0] if t.grad_fn not in self._cut]

    def go_back(self, output: Value, own: Iterable[Tensor]) -> None:
        """Measure the backward of the model's own code, whose own parameters are given."""
        self._note_roots(output)
        # Hooks of parameters are for gradients that count.
        parameters = [p for p in own if p.requires_grad and not p._backward_hooks]
        for node in _nodes([root.grad_fn for root in self._roots]):
            k = bisect_right(self._marks, node._sequence_nr(), key=itemgetter(0)) - 1
            node.register_prehook(partial(self._go_on, self._marks[k][1]))
        self._backward(self._roots, [*self._leaves, *parameters])

    def _go_on(self, block: str | None, grads: Any) -> None:
        """A node of a block is about to run."""
        if block != self._current:
            self.charge()
            self._current = block
            self.resume()


def _next_number() -> int:
    """The number of the next node that is made on this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _fresh(value: Value) -> Value:
    """``value`` with copies of those tensors that require grad, which are no leaves."""
    tensors, rebuild = differentiable(value)
    return rebuild(tuple([tensor.clone() for tensor in tensors]))


def _nodes(roots: Sequence[Any]) -> set[Any]:
    """The nodes of a graph, but for its leaves, which have no number."""
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

    def __init__(self, device: torch.device, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._device = device
        self._own = {id(tensor) for tensor in own}
        self._copies: dict[int, Tensor] = {}
        self._is_paused = False

    @property
    def copies(self) -> Iterable[Tensor]:
        """The copies of the model's tensors that have been needed."""
        return self._copies.values()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations have what they are called with."""
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
        if id(tensor) not in self._own:
            return tensor.to(self._device)
        if id(tensor) not in self._copies:
            copy = tensor.detach().to(self._device).requires_grad_(tensor.requires_grad)
            self._copies[id(tensor)] = copy
        return self._copies[id(tensor)]
