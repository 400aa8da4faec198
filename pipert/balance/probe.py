"""Runs a module's layers one at a time on the measuring device, without touching the module.

Costs are measured on a copy of each layer, made directly on the device and dropped before
the next one is copied. So a module larger than the device can be measured, and its parameters,
gradients and buffers are not touched. Copies have no hooks, which might record what they see,
except the forward pre-hooks that layers use to compute their weights. torch's generators are
restored afterwards.
"""

from __future__ import annotations

import contextvars
import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipert._typing import Device, Value
from pipert.batch.microbatch import Arguments, scatter
from pipert.batch.tensors import Carried, tensors_of
from pipert.model.calls import settled
from pipert.model.devices import default_devices, parse_devices, where_tensors_are
from pipert.model.split import check_module
from pipert.skip.namespace import Key
from pipert.skip.routes import PartitionSkips, routes
from pipert.skip.store import of_task
from pipert.skip.verify import verify_skippables

__all__: list[str] = []

T = TypeVar("T")


@dataclass(frozen=True)
class Probe:
    """One layer to measure, and its inputs."""

    layer: nn.Module
    """A copy, on ``device``."""
    device: torch.device
    value: Value
    """The input."""
    skips: PartitionSkips
    """The skips that it stashes and pops."""
    arriving: tuple[Value, ...]
    """The values that it pops."""

    def inputs(self) -> Carried:
        """Returns the inputs for one forward: not leaves, so that the layer may work in place."""
        tensors, rebuild = tensors_of(Carried(self.value, self.arriving))
        clones: Carried = rebuild(
            tuple([t.detach().requires_grad_(t.requires_grad).clone() for t in tensors])
        )
        return clones

    def forward(self, inputs: Carried) -> Carried:
        """Runs the layer; returns its output and the values stashed for later layers."""
        return contextvars.copy_context().run(self._forward, inputs)

    def _forward(self, inputs: Carried) -> Carried:
        store = self.skips.store(inputs.skips)
        of_task.set(store)
        args, kwargs = _arguments(inputs.value)
        output = self.layer(*args, **kwargs)
        return Carried(output, tuple([store.send(key) for key, _ in self.skips.leaving]))


def _arguments(value: Value) -> Arguments:
    return value if isinstance(value, Arguments) else Arguments((value,))


def micro_batches(sample: Value, chunks: int) -> list[Value]:
    """Returns the first layer's input for each micro-batch of ``sample``."""
    return scatter(*_arguments(sample), chunks)


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
    where = measuring_device(device)
    check_not_meta(module, where)
    named = [(name, layer) for name, layer in module._modules.items() if layer is not None]
    one_layer_each = routes([nn.Sequential(layer) for _, layer in named])
    stashed: dict[Key, Value] = {}
    results = []
    generators = [where.index] if where.type == "cuda" else []
    with torch.random.fork_rng(generators), torch.inference_mode(False), torch.enable_grad():
        value = settled(value, where)
        for (name, layer), skips in zip(named, one_layer_each, strict=True):
            arriving = tuple([stashed[key] for key, _ in skips.arriving])
            try:
                result, output = measure(Probe(copied(layer, where), where, value, skips, arriving))
            except Exception as error:
                error.add_note(f"while layer {name!r} ({type(layer).__qualname__}) was measured")
                raise
            results.append(result)
            value = settled(output.value, where)
            for (key, _), skip in zip(skips.leaving, output.skips, strict=True):
                stashed[key] = settled(skip, where)
            del output
            torch.clear_autocast_cache()  # it would keep the layer alive
    return results


def measuring_device(device: Device | None) -> torch.device:
    """Returns the device to measure on: the first of ``Pipe``'s defaults for ``None``."""
    if device is None:
        return default_devices(1)[0]
    if str(device) == "meta":  # pipes cannot run there, but sizes can be counted
        return torch.device("meta")
    return where_tensors_are(parse_devices([device]))[0]


def check_not_meta(module: nn.Module, device: torch.device) -> None:
    """Refuses parameters without values, unless only their sizes matter."""
    if device.type != "meta" and any(p.is_meta for p in module.parameters()):
        raise ValueError(
            f"the module is on 'meta' and cannot be measured on {str(device)!r}; materialise it, or"
            " count sizes with device='meta'"
        )


def copied(layer: nn.Module, device: torch.device, *, hooked: bool = False) -> nn.Module:
    """Copies ``layer`` with its parameters directly onto the device.

    With ``hooked`` the copy shares the layer's forward hooks. They are not copied, since a hook's
    copy may include a copy of the object it belongs to.
    """
    memo: dict[int, Any] = {}
    for tensor in (*layer.parameters(), *layer.buffers()):
        if is_lazy(tensor):
            raise ValueError("a layer has parameters that are not initialised; call it once before")
        moved = tensor.detach().to(device, copy=True)
        if type(tensor) is nn.Parameter:
            memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad)
        elif type(tensor) is Tensor:
            memo[id(tensor)] = moved
    for module in layer.modules():
        for name in (*_BACKWARD_HOOKS, *_FORWARD_HOOKS):
            memo[id(getattr(module, name))] = OrderedDict()
        for name in (*_FORWARD_HOOKS, *_PRE_HOOKS) if hooked else ():
            hooks = getattr(module, name)
            memo[id(hooks)] = hooks
        for value in vars(module).values():  # deepcopy refuses computed tensors
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().to(device, copy=True)
    try:
        result: nn.Module = copy.deepcopy(layer, memo).to(device)
    except Exception as error:
        error.add_note(
            "a layer that cannot be copied cannot be measured; measure it yourself, and pass the "
            "costs of all layers to balance_by_cost"
        )
        raise
    result.zero_grad(set_to_none=True)
    return result


_FORWARD_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
_PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
