"""Runs a module's layers one at a time on the measuring device, without touching the module.

Costs are measured on a copy of each layer, which is dropped before the next one is copied. So a
module larger than the device can be measured, and its parameters, gradients and buffers are not
touched. The copies share the layers' forward hooks, which run as in training. torch's generators
are restored afterwards.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipert._torch import identity
from pipert._typing import Device, Value
from pipert.batch.microbatch import Arguments, scatter
from pipert.batch.tensors import Carried, tensors_of
from pipert.model.calls import check_initialised, settled
from pipert.model.devices import default_devices, parse_devices, where_tensors_are
from pipert.model.split import check_module
from pipert.skip.namespace import Key
from pipert.skip.routes import PartitionSkips, routes
from pipert.skip.store import of_task
from pipert.skip.verify import verify_skippables

__all__: list[str] = []

T = TypeVar("T")


NO_SKIPS = PartitionSkips((), (), {})


@dataclass(frozen=True)
class Probe:
    """One layer to measure, and its inputs."""

    original: nn.Module
    layer: nn.Module
    """A copy, on ``device``."""
    device: torch.device
    carried: Carried
    """Its input, and the values of the skips that it pops."""
    skips: PartitionSkips
    """The skips that it stashes and pops."""

    def inputs(self) -> Carried:
        """Returns the inputs for one forward: not leaves, so that the layer may work in place."""
        inputs: Carried = cloned(settled(self.carried, self.device))
        return inputs

    def forward(self, inputs: Carried) -> Carried:
        """Runs the layer; returns its output and the values stashed for later layers."""
        return contextvars.copy_context().run(self._forward, inputs)

    def _forward(self, inputs: Carried) -> Carried:
        store = self.skips.store(inputs.skips)
        of_task.set(store)
        args, kwargs = as_arguments(inputs.value)
        output = self.layer(*args, **kwargs)
        return Carried(output, tuple([store.send(key) for key, _ in self.skips.leaving]))


def as_arguments(value: Value) -> Arguments:
    """Returns what a layer is called with if it gets ``value``."""
    return value if isinstance(value, Arguments) else Arguments((value,))


def micro_batches(sample: Value, chunks: int) -> list[Value]:
    """Returns the first layer's input for each micro-batch of ``sample``."""
    return scatter(*as_arguments(sample), chunks)


def cloned(value: Value) -> Value:
    """Returns ``value`` with each tensor cloned, as a part of the graph if it requires grad."""
    tensors, rebuild = tensors_of(value)
    return rebuild(tuple([tensor.clone() for tensor in tensors]))


def storages(value: Value) -> dict[int, int]:
    """Returns the bytes of each storage behind the tensors of ``value``."""
    found = [tensor.untyped_storage() for tensor in tensors_of(value)[0]]
    return {identity(storage): storage.nbytes() for storage in found}


@contextlib.contextmanager
def collecting_saved() -> Iterator[list[Tensor]]:
    """Collects the tensors that are saved for the backward."""
    found = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return found[-1]  # an output itself would keep its graph, which keeps the output

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def probe_layers(
    module: nn.Sequential,
    value: Value,
    device: Device | None,
    measure: Callable[[Probe], tuple[T, Carried]],
) -> list[T]:
    """Calls ``measure`` for each layer, in order, and returns its results.

    ``measure`` gets a probe on the device (default: the first of ``Pipe``'s defaults), with grad
    enabled. It returns its result, and that of a forward of the probe.
    """
    check_module(module)
    verify_skippables(module)
    where = measuring_device(device, module)
    named = [(name, layer) for name, layer in module._modules.items() if layer is not None]
    one_layer_each = routes([nn.Sequential(layer) for _, layer in named])
    stashed: dict[Key, Value] = {}
    results = []
    generators = [where.index] if where.type == "cuda" else []
    with torch.random.fork_rng(generators), torch.inference_mode(False), torch.enable_grad():
        value = settled(value, where)
        for (name, layer), skips in zip(named, one_layer_each, strict=True):
            carried = Carried(value, tuple([stashed[key] for key, _ in skips.arriving]))
            try:
                result, output = measure(
                    Probe(layer, copied(layer, where), where, carried, skips)
                )
            except Exception as error:
                note_layer(error, name, layer)
                raise
            results.append(result)
            value = settled(output.value, where)
            for (key, _), skip in zip(skips.leaving, output.skips, strict=True):
                stashed[key] = settled(skip, where)
            del output
            torch.clear_autocast_cache()  # it would keep the layer alive
    return results


def note_layer(error: Exception, name: str, layer: nn.Module) -> None:
    """Adds to an error which layer was measured."""
    error.add_note(f"while layer {name!r} ({type(layer).__qualname__}) was measured")


def measuring_device(device: Device | None, module: nn.Module) -> torch.device:
    """Returns the device to measure on: the first of ``Pipe``'s defaults for ``None``.

    Refuses parameters without values, unless only their sizes matter.
    """
    check_initialised(module)
    if str(device) == "meta":  # pipes cannot run there, but sizes can be counted
        return torch.device("meta")
    where = default_devices(1) if device is None else where_tensors_are(parse_devices([device]))
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            f"the module is on 'meta' and cannot be measured on {str(where[0])!r}; materialise it, "
            "or count sizes with device='meta'"
        )
    return where[0]


def copied(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copies ``layer`` to the device. The copy shares its forward hooks."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                memo[id(value)] = type(value)() if "backward" in name else value
            elif isinstance(value, Tensor) and not value.is_leaf:  # which deepcopy refuses
                memo[id(value)] = value.detach().to(device, copy=True)
    try:
        return copy.deepcopy(layer, memo).to(device)
    except Exception as error:
        error.add_note(
            "a layer that cannot be copied cannot be measured; measure it yourself, and pass the "
            "costs of all layers to balance_by_cost"
        )
        raise
