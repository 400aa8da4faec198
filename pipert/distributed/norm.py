"""Computes the norm of the gradients on all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from pipert.distributed.asked import Site

__all__: list[str] = []


def norm_of_all(grads: Sequence[Tensor], norm_type: float, site: Site) -> Tensor:
    """Return the norm of this rank's gradients together with those of other ranks.

    Each rank gets the norms of all and combines them, since a maximum over gloo may lose a NaN.

    Raises:
        ValueError: ``norm_type`` is not positive, or differs between ranks.
    """
    with site.control.agreeing("grad_norm()") as brought:
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, got {norm_type}")
        norm = get_total_norm(grads, norm_type).to(site.device)
        brought.append((norm_type, norm.dtype if grads else None))
    site.control.require_same("norm_type", [each for each, _ in brought])
    dtypes = [dtype for _, dtype in brought if dtype is not None] or [norm.dtype]
    with site.control.talking():
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm = norm.double()  # one dtype on all ranks; a half overflows when squared
        norms = [torch.empty_like(norm) for _ in range(site.group.size())]
        dist.all_gather(norms, norm, site.group)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total.to(reduce(torch.promote_types, dtypes))
