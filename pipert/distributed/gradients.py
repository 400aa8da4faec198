"""Accumulates the gradients of one mini-batch, and sums those of parameters that ranks share.

A parameter that partitions on several ranks share has a copy on each of them. The copies start with
the same values and get the same gradient, the sum over these ranks, so identical optimizers keep
them identical.
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

    def add(self, tied: Sequence[Tied], factor: Tensor) -> None:
        """Add the gradients of the mini-batch, times ``factor``, to earlier ones.

        Those of ``tied`` parameters are summed over their ranks first.
        """
        for parameter, group, *_ in tied:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:  # on other ranks it may be dense
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
