"""Splits a model into partitions, of which this rank keeps its own."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipert._torch import refuse_unsupported
from pipert.distributed.rank_gradients import SharedParameters
from pipert.distributed.rank_partition import StageModule
from pipert.distributed.rank_reports import RankSettings
from pipert.distributed.replay_model import ReplayModel
from pipert.distributed.torch_schedules import check_schedule, ranks_of
from pipert.layers.place import last_layer
from pipert.model.settings import check_checkpoint, check_chunks
from pipert.model.split import sequential, split
from pipert.skip.routes import PartitionSkips, routes_along


class RankParts(NamedTuple):
    """A model split into partitions, with this rank's on their device."""

    replayed: ReplayModel | None
    """What replays the model's own forward; ``None`` for an ``nn.Sequential``."""
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


def check_settings(
    chunks: int, schedule: str, checkpoint: str | None, deferred: bool | None, n: int, ranks: int
) -> RankSettings:
    """Check the settings of a pipe with ``n`` partitions, and fill in defaults."""
    default = "except_last" if schedule == "gpipe" else "never"
    chosen = check_checkpoint(checkpoint) or default
    name = check_schedule(schedule, n, ranks, chosen)
    return RankSettings(check_chunks(chunks), chosen, name, bool(deferred))


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
    uses: dict[nn.Parameter, set[int]] = {}
    for j, partition in enumerate(partitions):
        for parameter in partition.parameters():
            uses.setdefault(parameter, set()).add(j)
    shared = shared_of(uses, placement, ranks)
    me = ranks.index(dist.get_rank())
    own = [(j, part) for j, part in enumerate(partitions) if placement[j] == me]
    modules = {j: _placed(part, device) for j, part in own}
    before = ["", *map(last_layer, partitions)]
    skips = routes_along(partitions)
    return RankParts(None, placement, modules, skips, before, shared, layout_of(module))


def shared_of(
    uses: Mapping[nn.Parameter, Iterable[int]], placement: list[int], ranks: list[int]
) -> SharedParameters:
    """Return the parameters whose partitions are on several ranks, from those that use each."""
    having = [(p, sorted({ranks[placement[j]] for j in used})) for p, used in uses.items()]
    return [pair for pair in having if len(pair[1]) > 1]


def layout_of(module: nn.Module) -> int:
    """Return a checksum of the names, shapes and dtypes of all parameters."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    return zlib.crc32(str(shapes).encode())


def _placed(partition: nn.Sequential, device: torch.device) -> Any:
    def place(tensor: Tensor) -> Tensor:
        on_meta = tensor.is_meta
        return torch.empty_like(tensor, device=device) if on_meta else tensor.to(device)

    partition._apply(place)  # type: ignore[no-untyped-call]
    module: Any = sequential(partition._modules, partition.training, StageModule)
    return module
