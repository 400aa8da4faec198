"""Tied weights: one parameter that layers on several devices use.

The standard way is a parameter on each device, initialised alike, whose gradients are added up
before the optimizer's step by somebody who knows. Here it stays one parameter. It lives on the
device of the first partition that uses it, its *owner*; each other device computes with a copy:

1. The lane of a partition that does not own it copies it once in a run, before its first
   micro-batch, inside the graph. So the gradients of all its micro-batches are added up there,
   copied back once, and added into the one ``.grad`` by autograd.
2. While the partition's layers run, a :class:`Substitute` hands the copy to every torch function
   that is called with the parameter. The modules are not touched: names, ``state_dict`` and other
   runs do not notice.
3. A recomputation uses the copy of its forward.

What torch functions do not see, a substitute does not either: custom autograd functions get the
parameter itself, on its own device, and compiled and scripted layers are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert.value import version

__all__: list[str] = []

Weights = tuple[nn.Parameter, ...]
Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]


def borrowed(
    partitions: Sequence[nn.Module], devices: Sequence[torch.device]
) -> tuple[Weights, ...]:
    """The parameters that each partition uses and that live on another device."""
    owners: dict[nn.Parameter, torch.device] = {}
    found = []
    for partition, device in zip(partitions, devices, strict=True):
        parameters = tuple(partition.parameters())
        found.append(tuple(p for p in parameters if owners.setdefault(p, device) != device))
    return tuple(found)


class Ties:
    """The parameters that each partition borrows, as long as the parameters stay the same objects.

    Loading with ``assign=True`` makes others, as does assigning one to a layer.
    """

    __slots__ = ("_places", "weights")

    def __init__(
        self, partitions: Sequence[nn.Module], devices: Sequence[torch.device]
    ) -> None:
        self.weights = borrowed(partitions, devices)
        several = len(set(devices)) > 1
        self._places = [place for p in partitions for place in places(p)] if several else []

    def are_current(self) -> bool:
        """Whether the parameters are still the same."""
        return all(home.get(name) is parameter for home, name, parameter in self._places)


def places(module: nn.Module) -> list[Place]:
    """The parameters of a module by where they are looked up, which is quick to do again.

    A scripted module cannot be looked up in.
    """
    return [
        (home if isinstance(home, dict) else {name: parameter}, name, parameter)
        for home in (child._parameters for child in module.modules())
        for name, parameter in home.items()
    ]


def check_borrowers(partition: nn.Module, weights: Weights) -> None:
    """Refuse layers that a copy cannot be handed to.

    Raises:
        ValueError: a compiled or scripted layer uses a parameter that lives on another device.
    """
    of_others = set(weights)
    for name, layer in partition.named_children():
        if of_others.isdisjoint(layer.parameters()):
            continue
        for kind, is_kind in (("scripted", _is_scripted), ("compiled", _is_compiled)):
            if any(map(is_kind, layer.modules())):
                raise ValueError(
                    f"layer {name!r} is {kind} and uses a parameter that lives on another device, "
                    "whose copy cannot be handed to it; choose a balance that puts the layers that "
                    f"share it on one device, or use the layer as it was before it was {kind}"
                )


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_compiled(module: nn.Module) -> bool:
    # The first is what torch.compile(module) returns, the second what module.compile() sets.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class Substitute(TorchFunctionMode):
    """Hands ``copies`` to the torch functions that are called with ``weights``.

    Raises, when it ends, ``RuntimeError`` if a copy was modified in place: the parameter was not.
    """

    def __init__(self, weights: Weights, copies: Sequence[Tensor]) -> None:
        super().__init__()
        self._copies = {id(weight): copy for weight, copy in zip(weights, copies, strict=True)}
        self._versions = [version(copy) for copy in copies]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copies.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(map(self._swap, value))
        if type(value) is dict:
            return {key: self._swap(item) for key, item in value.items()}
        return value

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if error is None and [version(c) for c in self._copies.values()] != self._versions:
            raise RuntimeError(
                "a layer modified a parameter in place that lives on another device, where that "
                "would be lost; choose a balance that puts the layers that share it on one device"
            )
