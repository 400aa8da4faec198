"""Measures the blocks of a model, each from the first call of its module to that of the next one's.

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
3. Of the model's own code only the forward is measured; its backward counts as twice that.
4. The model may be on other devices. The layers' copies are on the measuring device, and every
   tensor that an operation of the model's own code uses is brought there.

To be timed, each call of a layer computes once, since its arguments may remember it, as a cache of
keys and values does. So there is no call to warm up: callers should ignore the first round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.autograd.hooks import without_hooks
from pipert.balance.by_time import forward_and_backward, now
from pipert.balance.probe import (
    NO_SKIPS,
    Probe,
    cloned,
    collecting_saved,
    copied,
    note_layer,
    storages,
)
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import Carried, tensors_of
from pipert.model.calls import (
    Gathering,
    KeepingParameters,
    intercepted,
    keeping_parameters,
    settled,
    unchanged,
)

__all__: list[str] = []

T = TypeVar("T")


def block_times(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    begins: Collection[str],
    example: Arguments,
    device: torch.device,
    upstream: dict[str, set[str]] | None = None,
) -> dict[str, float]:
    """Return the seconds of each block, by the name of its layer, in the order of first calls.

    See :func:`measure_calls`.
    """
    found = measure_calls(
        model, layers, begins, example, device, _time, _time_own_code, upstream=upstream
    )
    return {name: sum(seconds) for name, seconds in found.items()}


def _time(probe: Probe) -> tuple[float, Carried]:
    return forward_and_backward(probe.forward, probe.inputs(), probe.layer, probe.device)


def _time_own_code(seconds: float, *_: int) -> float:
    return 3 * seconds  # rule 3


def measure_calls(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    begins: Collection[str],
    example: Arguments,
    device: torch.device,
    measure: Callable[[Probe], tuple[T, Carried]],
    own_code: Callable[[float, int, int, int], T],
    then: Callable[[Value], object] = lambda output: output,
    upstream: dict[str, set[str]] | None = None,
) -> dict[str, list[T]]:
    """Return what was measured of each block, by its layer's name, in the order of first calls.

    The layers called ``begins`` begin a block. Parameters, gradients, buffers and torch's random
    state stay unchanged. Forward hooks run.

    Args:
        model, layers, begins: the model, its layers, and the names of those that begin a block.
        example: the arguments of one micro-batch.
        device: where to measure.
        measure: returns what it finds of one call of a layer, and the output.
        own_code: makes as much of the seconds of the model's own code between two calls, of the
            bytes that it saves and does not share with these, and of those that it makes for the
            second one: all, and the ones that it saves.
        then: gets the model's output, and counts as its own code: a loss.
        upstream: gets, by its name, the layers that each one's first arguments were computed from,
            and those of which that is unknown, as their outputs need no gradient.
    """
    brought: list[Tensor] = []
    gathering = Gathering(device, brought)
    elsewhere = any(t.device != device for t in (*model.parameters(), *model.buffers()))
    with (
        unchanged(model, device),
        torch.inference_mode(False),
        torch.enable_grad(),
        collecting_saved() as saved,
        keeping_parameters(model) as keeping,
    ):
        weights = storages([*model.parameters(), *model.buffers()])
        calls = _Calls(
            layers, begins, device, gathering, keeping, measure, own_code, saved, brought, weights,
            {} if upstream is None else upstream,
        )  # fmt: skip
        with (
            intercepted(layers.values(), calls),
            gathering if elsewhere else contextlib.nullcontext(),
        ):
            args, kwargs = settled(example, device)
            calls.begin_own_code((args, kwargs))
            then(model(*args, **kwargs))
            calls.end_own_code(())
    calls.found.pop(_FIRST, None)
    return calls.found


_FIRST = "."  # stands for the first block, until it begins


class _Calls(Generic[T]):
    """Measures one forward of the model; its layers go backward one by one."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        begins: Collection[str],
        device: torch.device,
        gathering: Gathering,
        keeping: KeepingParameters,
        measure: Callable[[Probe], tuple[T, Carried]],
        own_code: Callable[[float, int, int, int], T],
        saved: list[Tensor],
        brought: list[Tensor],
        weights: Mapping[int, int],
        upstream: dict[str, set[str]],
    ) -> None:
        self._names = {layer: name for name, layer in layers.items()}
        self._begins = begins
        self._device = device
        self._gathering, self._keeping = gathering, keeping
        self._measure, self._own_code = measure, own_code
        self._block = _FIRST
        self._began = 0.0
        self._saved, self._brought = saved, brought
        """By the model's own code since the last layer, and for it from other devices."""
        self._weights = weights
        self._known: Mapping[int, int] = {}
        """The storages of the last layer's output."""
        self._given: Mapping[int, int] = {}  # those of its input
        self._upstream, self._unknown = upstream, set[str]()
        self._made_by = dict[Any, set[str]]()  # by an output's node, its layer and those upstream
        self.found: dict[str, list[T]] = {_FIRST: []}

    def begin_own_code(self, output: Value) -> None:
        """Start the clock behind a layer."""
        self._saved.clear()
        self._brought.clear()
        self._known = storages(output)
        self._began = now(self._device)

    def end_own_code(self, inputs: Value) -> None:
        """Count what the model's own code has cost, before a layer gets ``inputs``."""
        seconds = now(self._device) - self._began
        given, saves = storages(inputs), storages(self._saved)
        known = {*self._known, *self._weights, *storages(self._brought)}
        saved = sum(size for key, size in saves.items() if key not in known | given.keys())
        made = given.keys() - known - self._given.keys()
        sizes = [sum(given[key] for key in keys) for keys in (made, made & saves.keys())]
        self._given = given
        self.found[self._block].append(self._own_code(seconds, saved, *sizes))

    def call(self, module: nn.Module, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Measure a copy of a layer, and return its detached output."""
        name = self._names.get(module)
        if name is None:  # a layer inside a pipe
            return call(*args, **kwargs)
        self.end_own_code((args, kwargs))
        if name in self._begins and name not in self.found:
            self._block = name
            self.found[name] = self.found.pop(_FIRST, [])
        try:
            # Without the hooks of a checkpoint around layers.
            with self._gathering.paused(), self._keeping.paused(), without_hooks():
                output = self._of_layer(name, module, Arguments(args, kwargs))
        except Exception as error:
            note_layer(error, name, module)
            raise
        self.begin_own_code(output)
        return output

    def _of_layer(self, name: str, layer: nn.Module, arguments: Arguments) -> Value:
        upstream = self._sources(arguments)
        self._upstream.setdefault(name, upstream)
        copy, carried = copied(layer, self._device), Carried(arguments, ())
        found, output = self._measure(Probe(layer, copy, self._device, carried, NO_SKIPS))
        self.found[self._block].append(found)
        torch.clear_autocast_cache()  # it would keep the copy alive
        value = cloned(settled(output.value, self._device))  # no leaves: may be changed in place
        nodes = [tensor.grad_fn for tensor in tensors_of(value)[0] if tensor.requires_grad]
        self._made_by.update(dict.fromkeys(nodes, upstream | {name}))
        self._unknown |= {name} if not nodes else set()
        return value

    def _sources(self, value: Value) -> set[str]:
        """Return the layers from whose outputs the model's own code has computed a value."""
        found, seen = set(self._unknown), set[Any]()
        nodes = [tensor.grad_fn for tensor in tensors_of(value)[0]]
        while nodes:
            if (node := nodes.pop()) is not None and node not in seen:
                seen.add(node)
                found |= self._made_by.get(node, set())
                nodes += [before for before, _ in node.next_functions]
        return found
