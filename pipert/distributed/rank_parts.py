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
from pipert.distributed.rank_gradients import SharedParameters
from pipert.distributed.rank_partition import StageModule
from pipert.distributed.torch_schedules import ranks_of
from pipert.layers.place import last_layer
from pipert.model.split import sequential, split
from pipert.skip.routes import PartitionSkips, routes_along


class RankParts(NamedTuple):
    """A model split into partitions, with this rank's on their device."""

    placement: list[int]
    """For each partition, the index of its rank within the pipeline."""
    modules: dict[int, StageModule]
    """This rank's partitions, by number."""
    skips: Sequence[PartitionSkips]
    before: Sequence[str]
    """For each partition, the description of the layer before it, for errors."""
    shared: SharedParameters
    """In the same order on all ranks."""
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
) -> RankParts:
    """Split a model, and move only this rank's partitions to its device."""
    refuse_unsupported()
    counts = Counter(p for home in module.modules() for p in home._parameters.values())
    if any(count > 1 and p is not None and p.is_meta for p, count in counts.items()):
        raise ValueError(
            "parameters that several layers share cannot be on the meta device, where each layer "
            "would get others; build the model on CPU"
        )
    partitions = split(module, balance)
    placement = ranks_of(schedule, len(balance), len(ranks))
    homes: dict[nn.Parameter, set[int]] = {}
    for partition, home in zip(partitions, placement, strict=True):
        for parameter in partition.parameters():
            homes.setdefault(parameter, set()).add(ranks[home])
    shared = [(parameter, sorted(having)) for parameter, having in homes.items() if len(having) > 1]
    me = ranks.index(dist.get_rank())
    own = [(j, part) for j, part in enumerate(partitions) if placement[j] == me]
    modules = {j: _placed(part, device) for j, part in own}
    before = ["", *map(last_layer, partitions)]
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    layout = zlib.crc32(str(shapes).encode())
    return RankParts(placement, modules, routes_along(partitions), before, shared, layout)


def _placed(partition: nn.Sequential, device: torch.device) -> StageModule:
    def place(tensor: Tensor) -> Tensor:
        on_meta = tensor.is_meta
        return torch.empty_like(tensor, device=device) if on_meta else tensor.to(device)

    partition._apply(place)  # type: ignore[no-untyped-call]
    module = sequential(partition._modules, partition.training, StageModule)
    assert isinstance(module, StageModule)
    return module
