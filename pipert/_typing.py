"""Aliases shared by several modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

__all__: list[str] = []

Device: TypeAlias = torch.device | str | int
"""What names a device: ``'cuda:1'``, ``torch.device('cpu')``, or a CUDA index."""

Value: TypeAlias = Any
"""What flows through the lane: any pytree. Its leaves are tensors or are passed on as they are."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]

Devices: TypeAlias = Sequence[Device]
