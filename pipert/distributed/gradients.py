"""Accumulates the gradients of one mini-batch, and sums those of parameters that ranks share.

A parameter that partitions on several ranks share has a copy on each of them. The copies start with
the same values and get the same gradient, the sum over these ranks, so identical optimizers keep
them identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipert.autograd import order
from pipert.autograd.leaves import leaves_behind
from pipert.distributed.agreement import Control
from pipert.distributed.groups import make_group

__all__: list[str] = []

SharedParameters = list[tuple[nn.Parameter, list[int]]]
"""Each parameter that several ranks have, with these ranks."""


class Tied(NamedTuple):
    """A parameter that this rank shares with others."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    """The group of the ranks that have it."""
    is_first: bool
    """Whether this rank is the first of them."""
    number: int
    """Its index among all shared parameters, the same on all ranks."""


def find_shared(
    partitions: Sequence[nn.Module], placement: Sequence[int], ranks: Sequence[int]
) -> SharedParameters:
    """Return the parameters that several ranks have, in the same order on all ranks.

    Args:
        partitions: all partitions of the model.
        placement: for each of them, the index of its rank in ``ranks``.
        ranks: the ranks of the pipeline.
    """
    homes: dict[nn.Parameter, set[int]] = {}
    for partition, home in zip(partitions, placement, strict=True):
        for parameter in partition.parameters():
            homes.setdefault(parameter, set()).add(ranks[home])
    return [(parameter, sorted(having)) for parameter, having in homes.items() if len(having) > 1]


def tie(shared: SharedParameters, control: Control) -> list[Tied]:
    """Make groups for this rank's shared parameters; give all copies the first rank's values."""
    me = dist.get_rank()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    tied = []
    for number, (parameter, ranks) in enumerate(shared):
        if me in ranks:
            key = tuple(ranks)
            with control.talking():
                if key not in groups:
                    groups[key] = make_group(ranks)
                dist.broadcast(parameter.detach(), ranks[0], group=groups[key])
            tied.append(Tied(parameter, groups[key], me == ranks[0], number))
    return tied


def place_of(parameter: nn.Parameter, modules: Iterable[nn.Module]) -> tuple[nn.Module, str]:
    """Return a module that has the parameter, and its name there."""
    return next(
        (home, name)
        for module in modules
        for home in module.modules()
        for name, own in home._parameters.items()
        if own is parameter
    )


def shards_of(
    tied: Sequence[Tied], places: Sequence[tuple[nn.Module, str]], modules: Iterable[nn.Module]
) -> list[Tied]:
    """Return shared parameters after wrapping: ``fully_shard`` replaces them by their shards.

    Raises:
        ValueError: a parameter is no longer there.
    """
    found = []
    kept = {id(parameter) for module in modules for parameter in module.parameters()}
    for one, (home, name) in zip(tied, places, strict=True):
        parameter = one.parameter if id(one.parameter) in kept else home._parameters.get(name)
        if parameter is None:
            raise ValueError(f"wrap has removed {name!r}, which several ranks share, from {home}")
        found.append(one._replace(parameter=parameter))
    return found


def check_shards(layouts: Sequence[Mapping[int, Any]]) -> None:
    """Raise unless ranks report the same layout of each shared parameter, by its number."""
    if differ(layouts):
        raise ValueError(
            "a weight that several ranks share must be sharded alike on all of them; let wrap call "
            "fully_shard on it on each rank, or on none"
        )


def layouts_of(tied: Sequence[Tied]) -> dict[int, str]:
    """Say by number how shared parameters are sharded."""
    return {one.number: str(getattr(one.parameter, "placements", ())) for one in tied}


def differ(reports: Sequence[Mapping[int, object]]) -> bool:
    """Whether ranks report different things of a shared parameter, by its number."""
    known: dict[int, object] = {}
    pairs = [pair for report in reports for pair in report.items()]
    return any(known.setdefault(number, about) != about for number, about in pairs)


class Gradients:
    """The gradients from before a mini-batch, put aside while it runs.

    Args:
        parameters: this rank's, without duplicates.
        are_views: whether ``.grad`` shares the memory that the mini-batch writes to, such as DDP's
            buckets.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], are_views: bool) -> None:
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._put_aside(parameters, are_views)

    def put_aside_other_leaves(self, ys: Iterable[Tensor], xs: Iterable[Tensor]) -> None:
        """Put aside the gradients of leaves that layers train although they are not parameters.

        Args:
            ys: the outputs of a partition.
            xs: the leaves that entered it.
        """
        ends = [y.grad_fn for y in ys if y.grad_fn is not None]
        known = [*xs, order.ENTRANCE, *(parameter for parameter, _ in self._before)]
        self._put_aside(leaves_behind(ends, known).leaves, False)

    def _put_aside(self, leaves: Iterable[Tensor], are_views: bool) -> None:
        for leaf in leaves:
            dx = leaf.grad
            self._before.append((leaf, dx.clone() if are_views and dx is not None else dx))
            leaf.grad = None

    def restore(self) -> None:
        """Drop the gradients of the mini-batch, and put the earlier ones back."""
        for leaf, before in self._before:
            leaf.grad = before

    def add(self, tied: Sequence[Tied]) -> None:
        """Add the gradients of the mini-batch to earlier ones; first sum those of ``tied`` ones."""
        for parameter, group, *_ in tied:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:  # on other ranks it may be dense
                    parameter.grad = parameter.grad.to_dense()
                dist.all_reduce(_own_part(parameter.grad), group=group)
        for leaf, before in self._before:
            new = leaf.grad
            if new is not None and before is not None:
                leaf.grad = before.add_(new)
            elif new is None:
                leaf.grad = before


def _own_part(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
