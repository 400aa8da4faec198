"""Measures what layers cost, one call at a time, on copies.

The standard way is to run the model with hooks that read the clock. That takes a device with room
for the whole model, and then there would be no need for a pipeline. So each call of a layer is
computed by a copy on the measuring device, made for this call, and measured by itself. What follows
gets its detached output. Parameters, gradients, buffers and torch's random state stay unchanged;
forward hooks run.

The model's own forward runs, and layers of an ``nn.Sequential`` one after the other:

1. A *block* begins with the first call of its module. All that is measured belongs to the current
   block, including repeated calls of earlier layers and the model's own code between layers. What
   comes before the first block belongs to the first block.
2. The backward of a layer starts from ones for its output and ends at its parameters and those
   arguments that need a gradient. There is none if its output needs no gradient, as under
   ``no_grad``.
3. Of the model's own code only the forward is measured; its backward counts as twice that. What
   makes no tensor costs nothing.
4. The model may be on other devices: every tensor that an operation of its own code uses is brought
   to the measuring device. On meta, values are made up, layer by layer.
5. If the measuring device is meta, nothing is computed that depends on layers, see ``counted``. The
   model's own code computes with real values what depends on the example alone, such as masks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import pytree
from pipert._typing import Device, Value
from pipert.autograd.hooks import checkpoint_around, without_hooks
from pipert.balance.measure import (
    Blocks,
    Cost,
    Measure,
    MeasuredCall,
    Sizes,
    Storages,
    collecting_saved,
    joined,
    now,
    weights_of,
    without,
)
from pipert.batch.microbatch import Arguments, scatter
from pipert.batch.tensors import differentiable, tensors_of
from pipert.layers.modules import check_initialised
from pipert.model.calls import Gathering, Valueless, intercepted, settled, unchanged
from pipert.model.devices import default_devices, parse_devices, where_tensors_are
from pipert.model.settings import check_chunks
from pipert.model.split import check_module
from pipert.model.values import copy_of, has_values
from pipert.skip.declarations import keys_of, verify_skippables
from pipert.skip.store import Carried, Skips


class Chain(nn.Module):
    """Calls layers one after the other, and then a function, such as a loss."""

    def __init__(self, layers: Iterable[nn.Module], then: Callable[[Value], Value]) -> None:
        super().__init__()
        self.layers, self.then = nn.ModuleList(layers), then

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = Arguments(args, kwargs)
        for layer in self.layers:
            args, kwargs = as_arguments(value)
            value = layer(*args, **kwargs)
        return self.then(value)


def in_chain(module: Any) -> dict[str, nn.Module]:
    """Return the layers of a Sequential; each is another module, even if one is there twice."""
    check_module(module)
    verify_skippables(module)
    layers = dict[str, nn.Module]()
    for name, layer in zip(module._modules, module, strict=True):
        layers[name] = copy.copy(layer) if layer in layers.values() else layer
    return layers


def measure_layers(
    module: nn.Sequential, value: Value, device: Device | None, measure: Measure
) -> Blocks:
    """Return what ``measure`` finds of each layer, in order, for one micro-batch."""
    layers, where = in_chain(module), measuring_device(device, module)
    chain = Chain(layers.values(), then=lambda value: value)
    return measure_calls(chain, layers, layers, as_arguments(value), where, measure)


def measure_calls(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    begins: Collection[str],
    example: Arguments,
    device: torch.device,
    measure: Measure,
    *,
    stays: Value = None,
    upstream: dict[str, set[str]] | None = None,
) -> Blocks:
    """Return the cost of each block, by its layer's name, in the order of first calls.

    Args:
        model, layers, begins: the model, its layers, and the names of those that begin a block.
        example: the arguments of one micro-batch.
        stays: what is in memory anyway, such as a target.
        upstream: gets, by its name, the layers that each one's first arguments were computed from,
            and those of which that is unknown, as their outputs need no gradient.
    """
    upstream = {} if upstream is None else upstream
    calls = _Calls(model, layers, begins, device, measure, stays, upstream)
    is_counted = device.type == "meta"
    elsewhere = is_counted or any(
        t.device != device for t in (*model.parameters(), *model.buffers())
    )
    with (
        unchanged(model, device),
        torch.inference_mode(False),
        torch.enable_grad(),
        collecting_saved(calls.saved),
        intercepted(layers.values(), calls),
        calls.gathering if elsewhere else contextlib.nullcontext(),
        _without_caches(model),
    ):
        args, kwargs = settled(example, torch.device("cpu") if is_counted else device)
        calls.note((args, kwargs), set())
        calls.begin_own_code()
        output = model(*args, **kwargs)
        calls.end_own_code(output)
    return calls.costs()


@contextlib.contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Let models of transformers make no cache by default, as in a pipe that recomputes."""
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    configs = [each for each in configs if getattr(each, "use_cache", None) is True]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


_FIRST = "."  # stands for the first block, until it begins


class _Calls:
    """Measures one forward of the model; its layers go backward one by one."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        begins: Collection[str],
        device: torch.device,
        measure: Measure,
        stays: Value,
        upstream: dict[str, set[str]],
    ) -> None:
        self._model, self._begins, self._upstream = model, begins, upstream
        self._device, self._measure = device, measure
        self._storages, self._skips = Storages(), Skips()
        self._names = {layer: name for name, layer in layers.items()}
        self._block, self._began, self._known = _FIRST, 0.0, set[int]()
        self._found: dict[str, list[Cost]] = {_FIRST: []}
        self._weights = self._storages.sizes([*model.parameters(), *model.buffers(), stays])
        self.saved, self._brought = list[Tensor](), list[Tensor]()
        """By the model's own code since the last layer, and for it from other devices."""
        kind = Valueless if device.type == "meta" else Gathering
        self.gathering = kind(device, self._brought)
        self._unknown = set[str]()
        self._copied: tuple[Hashable, nn.Module] = (None, model)
        """The kind of the last layer without values, and its copy with some."""
        self._checkpoint: object = None  # around the last layer
        self._made_by = dict[Any, tuple[set[str], Sizes]]()
        """By the node of what layers get and give, the layers that computed it, and its bytes."""

    def costs(self) -> Blocks:
        """Return the costs of the blocks; weights of no layer that was called are the first's."""
        self._found.pop(_FIRST, None)
        found = {name: joined(costs) for name, costs in self._found.items()}
        called = {key for cost in found.values() for key in cost.parameters}
        for name, cost in [*found.items()][:1]:
            rest: Any = {k: without(each, called) for k, each in weights_of(self._model).items()}
            found[name] = joined([Cost(**rest), cost])
        return found

    def begin_own_code(self) -> None:
        """Start the clock, before the model runs and behind each layer."""
        self.saved.clear()
        self._brought.clear()
        self._began = now(self._device)

    def end_own_code(self, value: Value) -> set[str]:
        """Count what the model's own code has cost, before a layer gets ``value``.

        Returns:
            The layers from whose outputs it was computed.
        """
        seconds = now(self._device) - self._began
        sizes = self._storages.sizes
        names, used = self._sources(value)
        saved = without(sizes(self.saved), self._weights, sizes(self._brought))
        made = without(sizes(value), self._known)
        self.note(value, names)
        cost = Cost(seconds, 2 * seconds, 2 * seconds) if made else Cost()
        cost = cost._replace(inputs=used, outputs=made, saved=saved, kept=saved)
        self._found[self._block].append(cost)
        return names

    def call(self, module: nn.Module, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Measure a copy of a layer, and return its detached output."""
        name = self._names.get(module)
        if name is None:  # a layer inside a pipe
            return call(*args, **kwargs)
        with self.gathering.paused():  # the model's own code may hand it a parameter
            args, kwargs = pytree.tree_map_only(Tensor, self.gathering.bring, (args, kwargs))
        arguments = Arguments(args, kwargs)
        upstream = self.end_own_code(arguments)
        before, self._checkpoint = self._checkpoint, checkpoint_around()
        is_inside = before is self._checkpoint is not None  # of what a backward repeats as a whole
        if name in self._begins and name not in self._found and not is_inside:
            self._block = name
            self._found[name] = self._found.pop(_FIRST, [])
        self._upstream.setdefault(name, upstream)
        # Without the hooks of a checkpoint around layers.
        with self.gathering.paused(), without_hooks():
            cost, output = self._measured(name, module, arguments)
        self._found[self._block].append(cost)
        self.note(output, upstream | {name})
        if not differentiable(output)[0]:
            self._unknown.add(name)
        self.begin_own_code()
        return output

    def _measured(self, name: str, layer: nn.Module, arguments: Arguments) -> tuple[Cost, Value]:
        """Return what was measured of one call, and a detached copy of the output."""
        keys = keys_of(nn.Sequential(layer))
        popped = {key: self._skips.pop(key) for key in keys if key in self._skips}
        inputs = Carried(arguments, popped)
        one = MeasuredCall(layer, layer, self._device, inputs, self._storages)
        try:
            if not has_values(layer):  # one copy at a time, for as long as layers are equal
                if self._copied[0] != one.kind:
                    self._copied = None, layer
                    self._copied = one.kind, copy_of(layer, self._device)
                copied = self._copied[1]
            else:
                copied = copy_of(layer, self._device)
            cost, output = self._measure(one._replace(layer=copied))
        except Exception as error:
            error.add_note(f"while layer {name!r} ({type(layer).__qualname__}) was measured")
            raise
        torch.clear_autocast_cache()  # it would keep the copy alive
        # No leaves: the model may change them in place.
        value, left = self._storages.copied(settled(output, self._device))
        # A skip crosses a cut by itself, also where the next layer gets the same tensor.
        tensors, rebuild = tensors_of(left)
        left = rebuild(tuple([tensor.clone() for tensor in tensors]))
        self._skips.update(left)
        return cost._replace(outputs=self._storages.sizes((value, left))), value

    def note(self, value: Value, names: set[str]) -> None:
        """Note what goes into or comes out of a layer, and the layers that it was computed by."""
        self._known |= self._storages.sizes(value).keys()
        for tensor in tensors_of(value)[0]:
            if tensor.grad_fn is not None:
                self._made_by[tensor.grad_fn] = names, self._storages.sizes(tensor)

    def _sources(self, value: Value) -> tuple[set[str], Sizes]:
        """Return the layers by which a value was computed, and the bytes of what the model's own
        code computed it from."""
        found, used, seen = set(self._unknown), dict[int, int](), set[Any]()
        nodes = [tensor.grad_fn for tensor in tensors_of(value)[0]]
        while nodes:
            if (node := nodes.pop()) is None or node in seen:
                continue
            seen.add(node)
            if node in self._made_by:
                names, sizes = self._made_by[node]
                found |= names
                used.update(sizes)
            else:
                nodes += [before for before, _ in node.next_functions]
        return found, used


def as_arguments(value: Value) -> Arguments:
    """Return what a layer is called with if it gets ``value``."""
    return value if isinstance(value, Arguments) else Arguments((value,))


def micro_batches(example: Value, chunks: int) -> list[Value]:
    """Return the first layer's input for each micro-batch of ``example``."""
    return scatter(*as_arguments(example), check_chunks(chunks))


def measuring_device(device: Device | None, module: nn.Module) -> torch.device:
    """Return the device to measure on: the first of ``Pipe``'s defaults for ``None``."""
    check_initialised(module)
    if str(device) == "meta":  # pipes cannot run there, but sizes can be counted
        return torch.device("meta")
    found = default_devices(1) if device is None else where_tensors_are(parse_devices([device]))
    return found[0]
