"""Records the state of a partition at its first forward, which a recomputation must find again."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipert._torch import backward_hooks
from pipert.autograd.segment import other_kernels
from pipert.batch.tensors import Versions
from pipert.errors import RecomputationError
from pipert.layers.buffers import Buffers
from pipert.layers.modules import modules_of
from pipert.layers.never_recompute import is_exempt

Parameters = dict[str, nn.Parameter | None]
Place = tuple[Parameters, str, nn.Parameter | None]


class Snapshot:
    """A partition's parameters and their versions, mode, hooks and buffers. One per stage and run.

    Each ``R`` compares all but buffers. So the modules are walked once, and the comparison runs
    in C. In another mode a layer saves other tensors, which crash the kernels of ``F``'s graph. Of
    the modules inside a layer it is not compared: a layer may set it in its forward.
    """

    __slots__ = (
        "_dicts", "_hooks", "_layers", "_modes", "_names", "_numbers", "_parameters", "_places",
        "_settings", "_versions", "buffers", "exempt",
    )  # fmt: skip

    def __init__(self, partition: nn.Module) -> None:
        self._dicts: list[Parameters] = []  # for each parameter, the dict it is looked up in
        self._names: list[str] = []
        self._parameters: list[nn.Parameter | None] = []
        self._places: dict[nn.Module, list[Place]] = {}  # of the modules that were asked for
        self._versions = Versions()
        self._hooks: list[dict[int, Any]] = []  # of the backward, which change no output
        self._numbers: list[list[int]] = []
        self._settings = [*map(operator.call, SETTINGS.values())]
        self.buffers: dict[nn.Module, Buffers] = {}
        """Those of each layer."""
        self.exempt: set[nn.Module] = set()
        """The layers that are not recomputed. Their changes are not checked."""
        for layer in partition.children():
            self.add(layer)
        self._layers = list(self.buffers)
        self._modes = list(map(_mode, self._layers))

    def add(self, layer: nn.Module) -> None:
        """Record a layer, possibly of another partition, before its first call."""
        if layer in self.buffers or layer in self.exempt:
            return
        parts = modules_of(layer)
        if is_exempt(parts):
            self.exempt.add(layer)
            return
        self.buffers[layer] = Buffers(parts)
        hooks = [*chain.from_iterable(map(backward_hooks, parts))]
        self._hooks += hooks
        self._numbers += map(list, filter(None, hooks))
        known = len(self._parameters)
        for part in [] if _are_sharded(parts) else parts:  # runs for each module in each run
            if part._parameters:
                self._add_parameters(part)
        self._versions.add([p for p in self._parameters[known:] if p is not None])

    def _add_parameters(self, part: nn.Module) -> None:
        parameters: Any = part._parameters
        if type(parameters) is dict and _ORDINARY.issuperset(map(type, parameters.values())):
            self._dicts += [parameters] * len(parameters)
            self._names += parameters
            self._parameters += parameters.values()
            return
        for name, parameter in parameters.items():
            is_dict = isinstance(parameters, dict)  # not that of a scripted module
            self._dicts.append(parameters if is_dict else {name: parameter})
            self._names.append(name)
            self._parameters.append(parameter)

    def refuse_replaced(self, module: nn.Module) -> None:
        """Refuse to call ``module``, one of those inside, if its parameters were replaced.

        Its recomputation would use its own.
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
                "exempt it with pipert.never_recompute, or use checkpoint='never'"
            )

    def other_settings(self, of: Collection[str] = ()) -> str:
        """Return which settings of the process have changed; empty if none has. By default any."""
        pairs = zip(SETTINGS, self._settings, map(operator.call, SETTINGS.values()), strict=True)
        found = [
            f"{name} was {old} and is {new}"
            for name, old, new in pairs
            if old != new and (not of or name in of)
        ]
        return f"since the forward settings have changed: {', '.join(found)}" if found else ""

    def refuse_changes(self) -> None:
        """Refuse to recompute with other or modified parameters, or in another mode."""
        other_kernels.set(partial(self.other_settings, KERNELS))
        numbers = [*map(list, filter(None, self._hooks))]
        if [*map(_mode, self._layers)] != self._modes or numbers != self._numbers:
            raise RecomputationError(
                "the mode of a layer, or its backward hooks, are not those of its forward when it "
                "is recomputed; call train() and eval(), and register and remove hooks, before the "
                "forward or after the backward, or use checkpoint='never'"
            )
        found = map(dict.get, self._dicts, self._names)
        same = all(map(operator.is_, found, self._parameters))
        if not (same and self._versions.are_current()):
            raise RuntimeError(
                "a parameter of a partition was modified between a forward and its recomputation, "
                "or is another tensor, as with torch.func.functional_call; call the optimizer "
                "after the backward, or exempt with pipert.never_recompute a layer that changes it "
                "in its forward, such as nn.Embedding(max_norm=...), or parametrizes it for a "
                "moment, as peft's target_parameters do, or use checkpoint='never'"
            )


KERNELS: dict[str, Callable[[], object]] = {
    "FlashAttention": torch.backends.cuda.flash_sdp_enabled,
    "EfficientAttention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "CudnnAttention": torch.backends.cuda.cudnn_sdp_enabled,
}
SETTINGS = {"torch.get_default_dtype()": torch.get_default_dtype, **KERNELS}
"""Settings of the process that decide which operations are computed."""
_ORDINARY = {nn.Parameter, type(None)}
_mode: Callable[[nn.Module], bool] = operator.attrgetter("training")


def _are_sharded(parts: Iterable[nn.Module]) -> bool:
    """Whether modules have other parameters while they compute, as with ``fully_shard``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        issubclass(kind, fsdp.FSDPModule) for kind in {*map(type, parts)}
    )
