"""Gradients of one mini-batch: put aside what there was, add up what ranks share, arrive.

A parameter that partitions on several ranks share has a copy on each. The copies begin alike and
get the same gradient, the sum of those of all ranks that have one, so optimizers that are alike
keep them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipert.autograd import order
from pipert.autograd.leaves import leaves_behind
from pipert.distributed.agreement import Control

__all__: list[str] = []

Shared = list[tuple[nn.Parameter, list[int]]]


class Tied(NamedTuple):
    """A parameter that this rank shares with others."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    """Of the ranks that have it."""
    is_first: bool
    """Whether this rank is the first of them."""
    number: int
    """Among all that ranks share."""


def find_shared(
    partitions: Sequence[nn.Module], placement: Sequence[int], ranks: Sequence[int]
) -> Shared:
    """The parameters that several ranks have, with these ranks, in the same order on all.

    Args:
        partitions: all of them.
        placement: the rank of each, counted in the pipeline.
        ranks: of the pipeline.
    """
    homes: dict[nn.Parameter, set[int]] = {}
    for partition, home in zip(partitions, placement, strict=True):
        for parameter in partition.parameters():
            homes.setdefault(parameter, set()).add(ranks[home])
    return [(parameter, sorted(of)) for parameter, of in homes.items() if len(of) > 1]


def tie(shared: Shared, control: Control) -> list[Tied]:
    """Make the groups of the shared parameters that this rank has, and their values alike."""
    me = dist.get_rank()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    tied = []
    for number, (parameter, ranks) in enumerate(shared):
        if me in ranks:
            key = tuple(ranks)
            if key not in groups:
                groups[key] = control.make_group(ranks)
            with control.talking():
                dist.broadcast(parameter.detach(), ranks[0], group=groups[key])
            tied.append(Tied(parameter, groups[key], me == ranks[0], number))
    return tied


class Gradients:
    """Those that parameters had before a mini-batch, put aside while it runs.

    Args:
        parameters: each once.
        are_views: whether their memory is that of the mini-batch's, as of DDP's buckets.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], are_views: bool) -> None:
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._put_aside(parameters, are_views)

    def find(self, ys: Iterable[Tensor], arrived: Iterable[Tensor]) -> None:
        """Put aside those of what else layers train: leaves that are no parameters.

        Args:
            ys: what a partition has computed.
            arrived: leaves that it has computed that from.
        """
        ends = [y.grad_fn for y in ys if y.grad_fn is not None]
        known = [*arrived, order.ENTRANCE, *(parameter for parameter, _ in self._before)]
        self._put_aside(leaves_behind(ends, known).leaves, False)

    def _put_aside(self, leaves: Iterable[Tensor], are_views: bool) -> None:
        for leaf in leaves:
            dx = leaf.grad
            self._before.append((leaf, dx.clone() if are_views and dx is not None else dx))
            leaf.grad = None

    def restore(self) -> None:
        """Drop those of the mini-batch."""
        for leaf, before in self._before:
            leaf.grad = before

    def add(self, tied: Sequence[Tied], factor: Tensor) -> None:
        """Add those of the mini-batch, times ``factor``: one number on CPU."""
        for parameter, group, *_ in tied:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:  # and on other ranks it may be dense
                    parameter.grad = parameter.grad.to_dense()
                dist.all_reduce(parameter.grad, group=group)
        for leaf, before in self._before:
            new = leaf.grad
            if new is not None and before is not None:
                leaf.grad = before.add_(new.mul_(factor))
            elif new is not None:
                new.mul_(factor)
            else:
                leaf.grad = before
