"""Derives cuts and devices from a model's ``device_map``, and leaves it one.

``from_pretrained(device_map="auto")`` spreads a model over devices. It leaves a map from names of
modules to devices, and hooks that copy each module's arguments to the device of its parameters, so
that one device computes while the others wait. The map says where to cut; the hooks must go, since
they would make copies of their own. Neither accelerate nor transformers is imported for that: if a
model has hooks, the module that removes them is imported already.

While a model is in a pipe, its own ``hf_device_map`` says where its layers are, so that trainers
treat it as the parallel model that it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pipert._typing import Device
from pipert.layers.modules import modules_of
from pipert.model.cuts import is_called

_MAP = "hf_device_map"
_OF_ADAPTERS = re.compile(r"^base_model\.model\.|\.(modules_to_save|original_|base_layer|lora_).*")


def has_device_map(model: nn.Module) -> bool:
    """Return whether the model, or a module inside it, was loaded with a ``device_map``."""
    return any(vars(module).get(_MAP) for module in model.modules())


def cuts_of_device_map(model: nn.Module) -> tuple[list[str], list[torch.device]]:
    """Return the cuts that a ``device_map`` implies, and the device of each partition.

    The model is cut where the device changes, in the order in which modules are registered. A
    module without parameters, such as a rotary table, needs no device and begins no partition. A
    device occurs twice if the map returns to it, as for a head that is tied to the embedding.

    Args:
        model: a model that was loaded with a ``device_map``, or contains one, as peft's do.

    Raises:
        ValueError: the map offloads modules, or leaves out some with parameters.
    """
    prefix, owner = next(item for item in model.named_modules() if vars(item[1]).get(_MAP))
    given: Mapping[str, Device] = getattr(owner, _MAP)
    _refuse_offloading(given)
    known = dict(model.named_modules())  # lists a shared module under its first name only
    placed = [entry for entry in _entries(prefix, owner, prefix, given, None) if entry[0] in known]
    if missing := [name for name, device in placed if device is None]:
        raise ValueError(f"the device map has no device for {missing}; add them, or pass cuts")
    devices = [_parse(device) for _, device in placed if device is not None]
    changes = [k for k, (a, b) in enumerate(pairwise(devices), 1) if a != b]
    return [placed[k][0] for k in changes], [devices[k] for k in (0, *changes)]


def _refuse_offloading(given: Mapping[str, Device]) -> None:
    offloaded = {name: device for name, device in given.items() if str(device) in ("cpu", "disk")}
    if len(offloaded) == len(given) and set(map(str, given.values())) == {"cpu"}:
        return  # the whole model is on the CPU, and is computed there
    if offloaded:
        names = ", ".join(f"{name!r} to {str(device)!r}" for name, device in offloaded.items())
        raise ValueError(
            f"the device map offloads {names}, but a pipe computes each layer where it is kept; "
            "load the model without a device_map and pass devices with enough memory together, or "
            "load it with a max_memory without 'cpu'"
        )


def _entries(
    name: str, module: nn.Module, prefix: str, given: Mapping[str, Device], device: Device | None
) -> Iterator[tuple[str, Device | None]]:
    """Yield the modules that the map places, if they have parameters, with their devices.

    A module that cannot be called is represented by the first one inside it that can.
    """
    key = name[len(prefix) :].removeprefix(".")
    device = given.get(key, device)
    inside = [one for one in given if one != key and (one.startswith(f"{key}.") or not key)]
    if inside and module._modules:
        for child_name, child in module._modules.items():
            if child is not None:
                inner = f"{name}.{child_name}" if name else child_name
                yield from _entries(inner, child, prefix, given, device)
    elif next(module.parameters(), None) is not None:
        first = next((at for at, inner in module.named_modules() if is_called(inner)), None)
        if first is not None:
            at = f"{name}.{first}" if first else name
            yield at, given[inside[0]] if inside else device  # the keys inside are parameters


def _parse(device: Device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def remove_hooks(model: nn.Module) -> None:
    """Remove accelerate's hooks that move arguments to devices. Parameters stay where they are.

    Raises:
        ValueError: a hook does something else, such as offloading, which would be lost.
    """
    hooked = {m: vars(m)["_hf_hook"] for m in modules_of(model) if "_hf_hook" in vars(m)}
    if not hooked:
        return
    accelerate: Any = sys.modules["accelerate.hooks"]
    for module, hook in hooked.items():
        for one in hook.hooks if isinstance(hook, accelerate.SequentialHook) else (hook,):
            if type(one) is not accelerate.AlignDevicesHook or one.offload:
                raise ValueError(
                    f"{type(module).__qualname__} has the hook {one!r}, which a pipe would have to "
                    "remove, but which does more than move arguments; remove it yourself with "
                    "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
                )
    accelerate.remove_hook_from_module(model, recurse=True)
    for module in hooked:
        forward = vars(module).get("forward")  # accelerate leaves the class's method, bound
        if getattr(forward, "__func__", None) is type(module).forward:
            del module.forward


def device_map_of(
    model: nn.Module, home_of: Mapping[str, int], devices: Sequence[torch.device]
) -> dict[str, int | str]:
    """Return a ``device_map`` that loads a model where a pipe computes it.

    A layer all of whose weights are tied to those of an earlier partition goes to that device,
    where a pipe keeps them, too. The map of a model of peft is for its base.

    Args:
        model: on any device, also without values.
        home_of: the partition of each layer, in the order of calls, and of tensors outside of them.
        devices: the device of each partition.
    """
    first: dict[nn.Parameter, int] = {}
    modules, found = dict(model.named_modules()), dict[str, int | str]()
    for name in sorted(home_of, key=home_of.__getitem__):
        own = [*modules[name].parameters()] if name in modules else []
        homes = {first.setdefault(each, home_of[name]) for each in own}
        found[name] = _shown(devices[homes.pop() if len(homes) == 1 else home_of[name]])
    return {_OF_ADAPTERS.sub("", name): found[name] for name in home_of}


def _shown(device: torch.device) -> int | str:
    return device.type if device.index is None or device.type != "cuda" else device.index


def note_device_map(model: nn.Module, device_of: Mapping[str, torch.device]) -> None:
    """Set the model's ``hf_device_map``, if it is on several devices or had one."""
    if len(set(device_of.values())) > 1 or has_device_map(model):
        setattr(model, _MAP, {name: _shown(device) for name, device in device_of.items()})
