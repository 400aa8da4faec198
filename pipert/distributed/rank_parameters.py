"""Gives each rank its own parameters, of any model, and no others; adds up those that ranks share.

A parameter that partitions on several ranks share has a copy on each of them. The copies start with
the same values and get the same gradient, the sum over these ranks, so identical optimizers keep
them identical.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from pipert.distributed.rank_messages import RankPlace, transfers


def own_tree(
    model: nn.Module, own: set[nn.Parameter], layers: set[nn.Module], elsewhere: set[nn.Module]
) -> nn.Module:
    """Return modules with this rank's ``layers``, parameters and buffers, under the plain names.

    Containers are plain modules there, since the model's own have parts of other ranks, too. Of the
    layers ``elsewhere`` there are only parameters that this rank shares.
    """
    tree = nn.Module()
    tree.training = model.training
    for name, parameter in model._parameters.items():
        if parameter is not None and parameter in own:
            tree._parameters[name] = parameter
    if model not in elsewhere:
        tree._buffers = model._buffers
        tree._non_persistent_buffers_set = model._non_persistent_buffers_set
    for name, child in model._modules.items():
        if child in layers:
            tree._modules[name] = child
        elif child is not None:
            part = own_tree(child, own, layers, elsewhere)
            if part._parameters or part._buffers or part._modules:
                tree._modules[name] = part
    return tree


SharedParameters = list[tuple[nn.Parameter, list[int]]]
"""Each parameter that several ranks have, with these ranks."""


class TiedParameter(NamedTuple):
    """A parameter that this rank shares with others."""

    parameter: nn.Parameter
    ranks: list[int]
    """The ranks that have it."""
    number: int
    """Its index among all shared parameters, the same on all ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that have it."""
        return self.ranks[0] == dist.get_rank()


def tie(shared: SharedParameters, site: RankPlace) -> list[TiedParameter]:
    """Return this rank's shared parameters, once all copies have the first rank's values."""
    numbered = [TiedParameter(*pair, number) for number, pair in enumerate(shared)]
    tied = [one for one in numbered if dist.get_rank() in one.ranks]
    with site.agreement.talking():
        for parameter, ranks, _ in tied:
            values = parameter.detach()
            values.copy_(_exchange(values.contiguous(), ranks, site.group)[0])
    return tied


def check_tied(tied: Sequence[TiedParameter], modules: Iterable[nn.Module]) -> None:
    """Refuse a wrapper that has replaced a shared parameter, as ``fully_shard`` does."""
    kept = {parameter for module in modules for parameter in module.parameters()}
    if any(one.parameter not in kept for one in tied):
        raise ValueError(
            "wrap has replaced a weight that several ranks share, as fully_shard does, so copies "
            "would not stay the same; use DistributedDataParallel, or a weight for each rank"
        )


class EarlierGradients:
    """The gradients from before a mini-batch, put aside while it runs.

    Args:
        modules: what torch's stages call on this rank.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: dict[nn.Parameter, Tensor | None] = {}
        for module in modules:
            # DDP's buckets are written to by the mini-batch.
            are_views = getattr(module, "gradient_as_bucket_view", False)
            for parameter in module.parameters():
                dx = parameter.grad
                if parameter not in self._before:
                    self._before[parameter] = dx.clone() if are_views and dx is not None else dx
                    parameter.grad = None

    def restore(self) -> None:
        """Drop the gradients of the mini-batch, and put the earlier ones back."""
        for parameter, before in self._before.items():
            parameter.grad = before

    def add(self) -> None:
        """Add the gradients of the mini-batch to the earlier ones."""
        for parameter, before in self._before.items():
            new = parameter.grad
            if before is not None:
                parameter.grad = before if new is None else before.add_(new)


def sum_tied(tied: Sequence[TiedParameter], group: dist.ProcessGroup) -> None:
    """Give all copies of each shared parameter the sum of their gradients."""
    for parameter, ranks, _ in tied:
        if parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dense = grad.to_dense().contiguous()  # it may be sparse on some ranks alone
            parameter.grad = reduce(torch.add, _exchange(dense, ranks, group))


def _exchange(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all these ranks, in the same order on each.

    By no collective: the groups for it would take all ranks of the world to make.
    """
    is_own = [rank == dist.get_rank() for rank in ranks]
    parts = [tensor if own else torch.empty_like(tensor) for own in is_own]
    operations = []
    for rank, part, own in zip(ranks, parts, is_own, strict=True):
        if not own:
            operations += transfers(dist.isend, [tensor], rank, group)
            operations += transfers(dist.irecv, [part], rank, group)
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return parts


def norm_of_all(grads: Sequence[Tensor], norm_type: float, site: RankPlace) -> Tensor:
    """Return the norm of this rank's gradients together with those of other ranks.

    Each rank gets the norms of all and combines them, since a maximum over gloo may lose a NaN.
    """
    with site.agreement.agreeing("grad_norm()") as reports:
        if not (norm_type := float(norm_type)) > 0:
            raise ValueError(f"norm_type must be positive, got {norm_type}")
        kinds = defaultdict[Any, list[Tensor]](list)  # torch takes no DTensor beside others
        for grad in grads:
            kinds[getattr(grad, "device_mesh", None)].append(grad)
        own = [get_total_norm(some, norm_type).to(site.device) for some in kinds.values()]
        reports.append((norm_type, [norm.dtype for norm in own]))
    site.agreement.require_same("norm_type", [each for each, _ in reports])
    dtypes = [dtype for _, some in reports for dtype in some] or [torch.get_default_dtype()]
    with site.agreement.talking():
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in own]
        zero = torch.zeros((), dtype=torch.float64, device=site.device)
        # In one dtype on all ranks; a half overflows when squared.
        each = torch.stack([zero, *[norm.double() for norm in whole]])
        norm = torch.linalg.vector_norm(each, norm_type)
        norms = [torch.empty_like(norm) for _ in range(site.group.size())]
        dist.all_gather(norms, norm, site.group)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total.to(reduce(torch.promote_types, dtypes))
