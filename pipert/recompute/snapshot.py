"""Records the state of a partition at its first forward, which a recomputation must find again.

What else may have changed, and changes outputs, such as a mode or an attention kernel,
is seen by its effect (``recompute/effects.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from pipert._torch import backward_hooks
from pipert.batch.tensors import Versions
from pipert.errors import RecomputationError
from pipert.layers.modules import modules_of
from pipert.recompute.buffers import Buffers
from pipert.recompute.exempt import is_exempt

Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]
"""The dict in which a module looks a parameter up, its name there, and the parameter."""


class Snapshot:
    """A partition's parameters with versions, its hooks and buffers. One per stage and run."""

    __slots__ = ("_hooks", "_numbers", "_places", "_versions", "buffers", "exempt")

    def __init__(self, partition: nn.Module) -> None:
        self._places: dict[nn.Module, list[Place]] = {}  # of each layer
        self._versions = Versions()
        self._hooks: list[dict[int, Any]] = []  # of the backward, which change no output
        self._numbers: list[list[int]] = []
        self.buffers: dict[nn.Module, Buffers] = {}
        """Those of each layer."""
        self.exempt: set[nn.Module] = set()
        """The layers that are not recomputed. Their changes are not checked."""
        for layer in partition.children():
            self.add(layer)

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
        places = self._places[layer] = [] if _are_sharded(parts) else _places_in(parts)
        self._versions.add([p for _, _, p in places if p is not None])

    def refuse_replaced(self, layer: nn.Module) -> None:
        """Refuse to call a layer if its parameters were replaced: ``R`` would use its own."""
        if not _are_there(self._places[layer]):
            raise RuntimeError(
                "a layer is called with parameters in place of its own, as by "
                "torch.func.functional_call, which are not there when it is recomputed; "
                "exempt it with pipert.never_recompute, or use checkpoint='never'"
            )

    def refuse_changes(self) -> None:
        """Refuse to recompute with other backward hooks, or with other or modified parameters."""
        if [*map(list, filter(None, self._hooks))] != self._numbers:
            raise RecomputationError(
                "a layer has other backward hooks than in its forward when it is recomputed; "
                "register and remove hooks before the forward or after the backward, or use "
                "checkpoint='never'"
            )
        if not (all(map(_are_there, self._places.values())) and self._versions.are_current()):
            raise RuntimeError(
                "a parameter of a partition was modified between a forward and its recomputation, "
                "or is another tensor, as with torch.func.functional_call; call the optimizer "
                "after the backward, or exempt with pipert.never_recompute a layer that changes it "
                "in its forward, such as nn.Embedding(max_norm=...), or parametrizes it for a "
                "moment, as peft's target_parameters do, or use checkpoint='never'"
            )


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
