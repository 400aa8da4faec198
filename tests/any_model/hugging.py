"""Describes families of ``transformers``, whose models are built from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.any_model.family import Family, Made, library, made

__all__ = ["hugging"]


def hugging(
    name: str,
    model: str,
    cuts: tuple[str, ...],
    batch: Callable[[], dict[str, Any]],
    *,
    config: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Family:
    """Describes a model class of ``transformers`` as a family."""
    make = partial(_make, model, config, batch, dtype)
    return Family(name, make, cuts, "transformers", **more)


def _make(
    model: str, config: dict[str, Any], batch: Callable[[], dict[str, Tensor]], dtype: torch.dtype
) -> Made:
    kind = getattr(library("transformers"), model)
    return made(kind(kind.config_class(**config)), batch(), dtype)
