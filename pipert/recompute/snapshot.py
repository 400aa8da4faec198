"""Records the state of a partition at its first forward, which a recomputation must find again.

Parameters and hooks of the backward must not have changed. What else may have changed, such as a
mode or an attention kernel, is seen by its effect (``recompute/effects.py``).

A normalisation layer in training mode updates its running statistics at each call, and a
recomputation calls it again. So while ``R[i,j]`` runs, layers have copies of their buffers, and
afterwards the buffers are put back:

1. The buffers of modules in training mode are put aside, if they are small or have been written
   since the run's first forward. The others may be the weights of a quantised model, or a mask.
2. A run copies a buffer once, however many recomputations it has. Where a result depends on what
   they leave in the copy, the check of effects refuses it.
3. Whoever finds copies, in a recomputation inside of another one or on another thread, computes
   with them. A forward of another caller loses its update that way (docs/sequential.md).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, setitem
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pipert._torch import backward_hooks
from pipert.batch.tensors import version
from pipert.errors import RecomputationError
from pipert.layers.modules import modules_of
from pipert.recompute.public import is_exempt

Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]
"""The dict in which a module looks a parameter up, its name there, and the parameter."""


class ParameterVersions:
    """A partition's parameters with versions, its hooks and buffers. One per stage and run."""

    __slots__ = ("_hooks", "_numbers", "_parameters", "_places", "_versions", "buffers", "exempt")

    def __init__(self, partition: nn.Module) -> None:
        self._places: dict[nn.Module, list[Place]] = {}  # of each layer
        self._parameters = list[nn.Parameter]()
        self._versions = list[int]()
        self._hooks: list[dict[int, Any]] = []  # of the backward, which change no output
        self._numbers: list[list[int]] = []
        self.buffers: dict[nn.Module, Buffers] = {}
        """Those of each layer."""
        self.exempt: set[nn.Module] = set()
        """The layers that are not recomputed. Their changes are not checked."""
        for layer in partition.children():
            self.add(layer)

    def add(self, layer: nn.Module) -> None:
        """Record a layer before its first call."""
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
        places = self._places[layer] = [] if _are_sharded(parts) else _places_in(parts)
        parameters = [p for _, _, p in places if p is not None and not p.is_inference()]
        self._parameters += parameters
        self._versions += map(_version, parameters)

    def recomputes(self, layer: nn.Module) -> bool:
        """Whether ``layer``, maybe of another partition, is recomputed; if so, record it.

        Raises:
            RuntimeError: its parameters are replaced while it is called; ``R`` would use its own.
        """
        self.add(layer)
        if layer in self.exempt:
            return False
        if not _are_there(self._places[layer]):
            raise RuntimeError(
                "a layer is called with parameters in place of its own, as by "
                "torch.func.functional_call, which are not there when it is recomputed; "
                "exempt it with pipert.never_recompute, or use checkpoint='never'"
            )
        return True

    def refuse_changes(self) -> None:
        """Refuse to recompute with other backward hooks, or with other or modified parameters."""
        if [*map(list, filter(None, self._hooks))] != self._numbers:
            raise RecomputationError(
                "a layer has other backward hooks than in its forward when it is recomputed; "
                "register and remove hooks before the forward or after the backward, or use "
                "checkpoint='never'"
            )
        are_there = all(map(_are_there, self._places.values()))
        if not are_there or [*map(_version, self._parameters)] != self._versions:
            raise RuntimeError(
                "a parameter of a partition was modified between a forward and its recomputation, "
                "or is another tensor, as with torch.func.functional_call; call the optimizer "
                "after the backward, or exempt with pipert.never_recompute a layer that changes it "
                "in its forward, such as nn.Embedding(max_norm=...), or parametrizes it for a "
                "moment, as peft's target_parameters do, or use checkpoint='never'"
            )


_version: Callable[[Tensor], int] = attrgetter("_version")  # which inference tensors lack


def _places_in(parts: Iterable[nn.Module]) -> list[Place]:
    found = list[Place]()
    for part in parts:  # runs for each module in each run
        for name, parameter in part._parameters.items():
            own = part._parameters
            found.append((own if isinstance(own, dict) else {name: parameter}, name, parameter))
    return found  # a scripted module has no dict


def _are_there(places: Iterable[Place]) -> bool:
    return all([own.get(name) is parameter for own, name, parameter in places])


def _are_sharded(parts: Iterable[nn.Module]) -> bool:
    """Whether modules have other parameters while they compute, as with ``fully_shard``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        issubclass(kind, fsdp.FSDPModule) for kind in {*map(type, parts)}
    )


SMALL = 1 << 16  # elements; such a buffer is put aside even if nothing shows that it changes


class Buffers:
    """The buffers of a layer's ``modules``, before their first forward in the run."""

    __slots__ = ("_copies", "_modules", "_versions")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._versions = {  # by id
            id(buffer): version(buffer)
            for module in self._modules
            for buffer in module._buffers.values()
        }
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id, each beside its original

    def put_aside(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, and leave the buffers as they are."""
        before: list[tuple[Any, str, Any]] = []
        for module in self._modules:
            if module.training:
                for name, buffer in module._buffers.items():
                    if original_of(buffer) is buffer:
                        before.append((module._buffers, name, buffer))
        back = map(setitem, *zip(*before, strict=True)) if before else iter(())
        try:
            for buffers, name, buffer in before:
                if self._may_change(buffer):
                    buffers[name] = self._copy_of(buffer)
            return call(*args, **kwargs)
        finally:
            deque(back, 0)  # one call of C, which no interrupt cuts short

    def _may_change(self, buffer: Tensor | None) -> bool:
        if buffer is None or buffer.requires_grad:
            return False
        return buffer.numel() <= SMALL or self._versions.get(id(buffer)) != version(buffer)

    def _copy_of(self, buffer: Tensor) -> Tensor:
        found = self._copies.get(id(buffer))
        if found is None:
            with torch.no_grad():
                found = self._copies[id(buffer)] = buffer, buffer.clone()
            setattr(found[1], _ORIGINAL, ref(buffer))
        return found[1]


_ORIGINAL = "pipert_original"


def original_of(value: Any) -> Any:
    """Return the buffer that a layer has ``value`` in place of while it is recomputed."""
    original = getattr(value, _ORIGINAL, None) if isinstance(value, Tensor) else None
    return value if original is None else original()
