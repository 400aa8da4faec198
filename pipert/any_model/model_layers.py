"""The layers of a model with its own ``forward``, and the *home* of each: its partition."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import nn

from pipert._torch import WithoutFunctions
from pipert.batch.tensors import map_each, tensors_of, version
from pipert.layers.compiling import is_compiled
from pipert.layers.parameter_copies import Substitute
from pipert.layers.place import describe_layer
from pipert.model.split import move
from pipert.stage.stage import Stage


class ModelLayer(NamedTuple):
    """A module that is called as a whole, in one partition."""

    module: nn.Module
    name: str
    """The name that errors show."""
    partition: int
    """Its home: it is on that partition's device, unless its first call is in another one."""
    begins: int
    """The partition that its first call begins, if it is a cut; else 0."""
    is_in_place: bool
    """Whether it declares that it changes its argument in place. It is not recomputed then: the
    argument's graph must contain the in-place operation itself."""
    is_compiled: bool
    """Whether torch.compile made any part of it."""


class ModelLayers(dict[nn.Module, ModelLayer]):
    """The layers, by module.

    Modules are not always called in the order of their registration: a table of rotary embeddings
    may be registered last and called first. So a layer whose first call is in a partition other
    than its home is moved to the device of that partition, for good.

    Args:
        model: the model.
        partitions: the layers of each partition, by name.
        cuts: the names of the layers that partitions begin with, except partition 0.
    """

    def __init__(
        self, model: nn.Module, partitions: Sequence[nn.Sequential], cuts: Sequence[str]
    ) -> None:
        begins = {name: j for j, name in enumerate(cuts, 1)}
        super().__init__(
            {
                layer: ModelLayer(
                    layer, describe_layer(name, layer), j, begins.get(name, 0),
                    _is_in_place(layer), is_compiled(layer),
                )  # fmt: skip
                for j, partition in enumerate(partitions)
                for name, layer in partition._modules.items()
                if layer is not None
            }
        )
        self.homes = {
            part: layer.partition for layer in self.values() for part in layer.module.modules()
        }
        """The partition of each module inside a layer."""
        self.around = {*model.modules()} - self.homes.keys()
        """The modules around the layers, and those that are never called."""
        self.encoders = {
            module
            for module in self.around
            if type(module).forward is nn.TransformerEncoder.forward
            and self.around.isdisjoint(module.get_submodule("layers").children())
        }
        """Those of torch whose own code computes nothing between its layers."""
        self.begun: set[int] = set()
        """The partitions that have begun with the call of their cuts."""
        self._has_run = False
        self._called: set[nn.Module] = set()
        self._placed = dict[ModelLayer, int]()
        """For each layer whose first parameter is its own, the partition it is in."""
        self._first = dict[ModelLayer, tuple[weakref.ref[nn.Module], str]]()
        """The module that has that parameter, and its name there."""
        seen: set[int] = set()
        for layer in self.values():
            name, tensor = next(layer.module.named_parameters(), ("", None))
            if tensor is not None and id(tensor) not in seen:
                owner, _, leaf = name.rpartition(".")
                self._placed[layer] = layer.partition
                self._first[layer] = weakref.ref(layer.module.get_submodule(owner)), leaf
            seen.update(map(id, layer.module.parameters()))
        self._used: set[int] = set()  # ids of the parameters and buffers of called layers
        first: dict[int, int] = {}  # for the id of each buffer, the first partition that has it
        self.shared_buffers = {
            id(buffer)
            for layer in self.values()
            for buffer in layer.module.buffers()
            if first.setdefault(id(buffer), layer.partition) != layer.partition
        }
        """The ids of buffers that layers of several partitions have. Nobody may write to them."""

    def move_on_first_call(self, layer: ModelLayer, stage: Stage) -> None:
        """Move a layer to the device of ``stage`` before its first call ever.

        That call is normally made by micro-batch 0, before others enter the partition.
        """
        if layer.module in self._called:
            return
        self._called.add(layer.module)
        if layer.partition != stage.place.j:
            self._move(layer.module, stage.place.device)
            if layer in self._placed:
                self._placed[layer] = stage.place.j
        tensors = (*layer.module.parameters(), *layer.module.buffers())
        self._used.update(map(id, tensors))

    def call_by_itself(
        self, layer: ModelLayer, devices: Sequence[torch.device], call: Callable[..., Any], /,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Call a layer that no pipe runs, on its own device, as accelerate's hooks do.

        Libraries call a model's head, decoder or embedding by itself. A tied weight of a layer that
        has others, too, is copied from the device of its owner.
        """
        own = [*layer.module.parameters(), *layer.module.buffers()]
        used = {tensor.device for tensor in own or tensors_of((args, kwargs))[0]}
        device = used.pop() if len(used) == 1 else devices[self._placed.get(layer, layer.partition)]
        bring = methodcaller("to", device)
        brought = map_each(args, bring), map_each(kwargs.values(), bring)
        if away := [x for x in own if x.device != device]:
            call = partial(Substitute([(x, bring(x), version(x)) for x in away]).during, call)
        return call(*brought[0], **dict(zip(kwargs, brought[1], strict=True)))

    def warn_of_cuts(self) -> None:
        """Warn, after the first run, of cuts at which no partition has begun."""
        if self._has_run:
            return
        self._has_run = True
        cuts = {layer.begins: layer.name for layer in self.values() if layer.begins}
        if missing := [name for j, name in sorted(cuts.items()) if j not in self.begun]:
            warnings.warn(
                f"no partition begins at {' and '.join(missing)}: the model has not called it by "
                "module(...), outside of other layers and before the later cuts. What follows runs "
                "in the partition before it; give example=... to see the order of calls, or choose "
                "other cuts",
                UserWarning,
                stacklevel=2,
            )

    def refuse_moved(self, devices: Sequence[torch.device]) -> None:
        """Refuse layers that have been moved away from the ``devices`` of their partitions.

        Raises:
            RuntimeError: someone has moved a layer, such as a trainer that is about to train.
        """
        with WithoutFunctions():  # an enclosing pipe would bring them to its current device
            for layer, (owner, name) in self._first.items():
                device, part = devices[self._placed[layer]], owner()
                tensor = None if part is None else part._parameters.get(name)
                if tensor is not None and tensor.device != device and not tensor.is_meta:
                    raise RuntimeError(
                        f"{layer.name} has been moved from {device} to {tensor.device}, but "
                        "the pipe computes it where it has put it; do not move the model of a pipe "
                        "(accelerate takes device_placement=False), or close the pipe first"
                    )

    def _move(self, module: nn.Module, device: torch.device) -> None:
        for part in module.modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and id(tensor) not in self._used:
                    move(part, name, device)


def _is_in_place(layer: nn.Module) -> bool:
    """Return whether ``layer`` declares itself in-place, or begins with a layer that does."""
    while isinstance(layer, nn.Sequential) and len(layer) > 0:
        layer = layer[0]
    return getattr(layer, "inplace", False) is True
