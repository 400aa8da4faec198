"""Records the state of a partition at its first forward, which a recomputation must find again."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from pipert.batch.tensors import Versions
from pipert.layers.buffers import Buffers, has_buffers
from pipert.layers.modules import modules_of
from pipert.layers.random_numbers import initialise_apart

__all__: list[str] = []

Parameters = dict[str, nn.Parameter | None]
Place = tuple[Parameters, str, nn.Parameter | None]


class Snapshot:
    """A partition's parameters and their versions, its mode and buffers. One per stage and run.

    Each ``R`` compares parameters and mode. So the modules are walked once, and the comparison runs
    in C. Of the modules inside a layer the mode is not compared: a layer may set it in its forward.
    """

    __slots__ = (
        "_dicts", "_layers", "_modes", "_modules", "_names", "_parameters", "_places", "_versions",
        "buffers",
    )  # fmt: skip

    def __init__(self, partition: nn.Module) -> None:
        self._layers = list(partition.children())
        self._modes = list(map(_mode, self._layers))
        self._modules: set[nn.Module] = set()
        self._dicts: list[Parameters] = []  # for each parameter, the dict it is looked up in
        self._names: list[str] = []
        self._parameters: list[nn.Parameter | None] = []
        self._places: dict[nn.Module, list[Place]] = {}  # of the modules that were asked for
        self._versions = Versions()
        self.buffers: Buffers | None = None
        """The buffers, if there are any."""
        self.add(partition)

    def add(self, module: nn.Module) -> None:
        """Record a module, possibly of another partition, before its first call."""
        if module in self._modules:
            return
        self._modules.add(module)
        parts = modules_of(module)
        known = len(self._parameters)
        for part in [] if _are_sharded(parts) else parts:  # runs for each module in each run
            if part._parameters:
                self._add_parameters(part)
        self._versions.add(p for p in self._parameters[known:] if p is not None)
        if any(map(has_buffers, parts)):
            self.buffers = self.buffers or Buffers()
            self.buffers.add(module, parts)

    def _add_parameters(self, part: nn.Module) -> None:
        parameters: Any = part._parameters
        if type(parameters) is dict and _ORDINARY.issuperset(map(type, parameters.values())):
            self._dicts += [parameters] * len(parameters)
            self._names += parameters
            self._parameters += parameters.values()
            return
        for name, parameter in parameters.items():
            if parameter is not None and is_lazy(parameter):  # until the first call
                initialise_apart(part)
            else:
                is_dict = isinstance(parameters, dict)  # not that of a scripted module
                self._dicts.append(parameters if is_dict else {name: parameter})
                self._names.append(name)
                self._parameters.append(parameter)

    def refuse_replaced(self, module: nn.Module) -> None:
        """Refuse to call ``module``, one of those inside, if its parameters were replaced.

        Raises:
            RuntimeError: they were; its recomputation would use its own parameters.
        """
        places = self._places.get(module)
        if places is None:
            own = {id(part._parameters) for part in modules_of(module)}
            every = zip(self._dicts, self._names, self._parameters, strict=True)
            places = self._places[module] = [place for place in every if id(place[0]) in own]
        if not all([parameters.get(name) is old for parameters, name, old in places]):
            raise RuntimeError(
                "a layer is called with parameters in place of its own, as by "
                "torch.func.functional_call, which are not there when it is recomputed; "
                "use checkpoint='never'"
            )

    def is_current(self) -> bool:
        """Whether the modules have the same parameters, unmodified, and the layers their mode."""
        found = map(dict.get, self._dicts, self._names)
        same = all(map(operator.is_, found, self._parameters)) and self._versions.are_current()
        return same and list(map(_mode, self._layers)) == self._modes

    def changed_mode(self) -> nn.Module | None:
        """Return the first layer whose mode has changed."""
        each = zip(self._layers, self._modes, strict=True)
        return next((layer for layer, mode in each if layer.training != mode), None)


_ORDINARY = {nn.Parameter, type(None)}
_mode: Callable[[nn.Module], bool] = operator.attrgetter("training")


def _are_sharded(parts: Iterable[nn.Module]) -> bool:
    """Whether modules have other parameters while they compute, as with ``fully_shard``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in parts)
