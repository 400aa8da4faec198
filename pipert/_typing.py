"""Aliases shared by several modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

__all__: list[str] = []

Device: TypeAlias = torch.device | str | int
"""Names a device: ``'cuda:1'``, ``torch.device('cpu')``, or a CUDA index."""

Value: TypeAlias = Any
"""What goes from stage to stage: any pytree. Leaves that are no tensors are passed on unchanged."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]

Devices: TypeAlias = Sequence[Device]
