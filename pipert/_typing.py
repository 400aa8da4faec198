"""Defines type aliases that several modules share."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Device: TypeAlias = torch.device | str | int
"""Names a device: ``'cuda:1'``, ``torch.device('cpu')``, or a CUDA index."""

Value: TypeAlias = Any
"""A value passed from stage to stage: any pytree. Leaves other than tensors stay unchanged."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]
