"""The layers of a driven model, and where they are at home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from pipert.layers.place import describe_layer
from pipert.model.split import move
from pipert.stage.stage import Stage

__all__: list[str] = []


class Layer(NamedTuple):
    """A module that is called as a whole, in one partition."""

    module: nn.Module
    name: str
    """As errors call it."""
    partition: int
    """The one that it is registered in, whose device it is on until it is called elsewhere."""
    begins: int
    """The partition that its call begins; 0 if it is no cut."""
    is_in_place: bool
    """Whether it says that it changes its argument: the change is known to the graph only if the
    operation is in it, so this one is not recomputed."""


class Layers(dict[nn.Module, Layer]):
    """The layers, by module.

    Modules are not always called in the order in which they are registered: a table of rotary
    embeddings may be the last of them, and is called first. So a layer that is called first away
    from home, on another device, is moved there, for good.

    Args:
        partitions: the layers of each, by name; the first of them but in partition 0 is the cut.
        cuts: the names of the cuts.
    """

    def __init__(self, partitions: Sequence[nn.Sequential], cuts: Sequence[str]) -> None:
        begins = {name: j for j, name in enumerate(cuts, 1)}
        super().__init__(
            {
                layer: Layer(
                    layer, describe_layer(name, layer), j, begins.get(name, 0), _in_place(layer)
                )
                for j, partition in enumerate(partitions)
                for name, layer in partition._modules.items()
                if layer is not None
            }
        )
        self._called: set[nn.Module] = set()
        self._used: set[int] = set()  # the ids of parameters and buffers of layers that were called

    def settle(self, layer: Layer, stage: Stage) -> None:
        """Move a layer to where it is about to be called, if it never was called before.

        The first micro-batch is the first to call it, on the worker of that partition.
        """
        if layer.module in self._called:
            return
        self._called.add(layer.module)
        if layer.partition != stage.place.j:
            self._move(layer.module, stage.place.device)
        tensors = (*layer.module.parameters(), *layer.module.buffers())
        self._used.update(map(id, tensors))

    def _move(self, module: nn.Module, device: torch.device) -> None:
        for part in module.modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and id(tensor) not in self._used:
                    move(part, name, device)


def _in_place(layer: nn.Module) -> bool:
    """Whether it says that it works in place, or begins with a layer that does."""
    while isinstance(layer, nn.Sequential) and len(layer) > 0:
        layer = layer[0]
    return getattr(layer, "inplace", False) is True
