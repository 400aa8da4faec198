"""Splits a model into partitions, of which this rank keeps its own."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipert._torch import refuse_unsupported
from pipert._typing import Device
from pipert.distributed.gradients import SharedParameters, find_shared
from pipert.distributed.schedules import ranks_of
from pipert.distributed.stages import StageModule
from pipert.layers.buffers import KEEPING
from pipert.layers.generators import DRAWING
from pipert.layers.place import last_layer
from pipert.model.split import sequential, split
from pipert.skip.routes import PartitionSkips, routes_along

__all__: list[str] = []


class Parts(NamedTuple):
    """A model split into partitions, with this rank's on their device."""

    placement: list[int]
    """For each partition, the index of its rank within the pipeline."""
    modules: dict[int, StageModule]
    """This rank's partitions, by number."""
    skips: Sequence[PartitionSkips]
    """The skips of each partition of the model."""
    before: Sequence[str]
    """For each partition, the description of the layer before it, for errors."""
    shared: SharedParameters
    layout: int
    """A checksum of the names, shapes and dtypes of all the model's parameters."""


def device_of(mesh: DeviceMesh, device: Device | None) -> torch.device:
    """Return this rank's device: the one given, or else the default for the mesh."""
    if device is not None:
        return torch.device(device)
    if mesh.device_type != "cuda":
        return torch.device(mesh.device_type)
    number = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", torch.cuda.current_device() if number is None else int(number))


def parts_of(
    module: nn.Sequential,
    balance: list[int],
    schedule: str,
    ranks: list[int],
    device: torch.device,
) -> Parts:
    """Split a model, and move only this rank's partitions to its device."""
    refuse_unsupported()
    DRAWING.prepare()
    KEEPING.prepare()
    partitions = split(module, balance)
    placement = ranks_of(schedule, len(balance), len(ranks))
    shared = find_shared(partitions, placement, ranks)
    if shared and any(p.is_meta for p, _ in shared):
        raise ValueError(
            "parameters that several partitions share cannot be on the meta device, where each "
            "rank would get others; build the model on CPU"
        )
    counts = Counter(p for home in module.modules() for p in home._parameters.values())
    if any(count > 1 and p is not None and p.is_meta for p, count in counts.items()):
        raise ValueError(
            "parameters that several layers share cannot be on the meta device, where each layer "
            "would get others; build the model on CPU"
        )
    me = ranks.index(dist.get_rank())
    modules = {
        j: _placed(part, device) for j, part in enumerate(partitions) if placement[j] == me
    }
    before = ["", *map(last_layer, partitions)]
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    layout = zlib.crc32(str(shapes).encode())
    return Parts(placement, modules, routes_along(partitions), before, shared, layout)


def _placed(partition: nn.Sequential, device: torch.device) -> StageModule:
    def place(tensor: Tensor) -> Tensor:
        on_meta = tensor.is_meta
        return torch.empty_like(tensor, device=device) if on_meta else tensor.to(device)

    partition._apply(place)  # type: ignore[no-untyped-call]
    module = sequential(partition._modules, partition.training, StageModule)
    assert isinstance(module, StageModule)
    return module
