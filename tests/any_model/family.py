"""Describes families of models that a pipe takes unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "ROWS", "Family", "Made", "Whole", "everything", "images", "library", "made", "own_loss",
    "pixels", "tokens",
]  # fmt: skip

ROWS = 8
"""The rows of a batch, which has four micro-batches."""
VOCABULARY = 40


def everything(output: Any) -> Tensor:
    """Computes a mean over the rows to which each entry of each tensor contributes differently."""
    return torch.stack(list(_each(output))).sum()


def _each(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim() == 0:
            yield leaf
        elif isinstance(leaf, Tensor) and leaf.requires_grad:
            places = torch.arange(1, leaf[0].numel() + 1, dtype=leaf.dtype)
            weights = places.cos().to(leaf.device)
            yield (leaf.flatten(1) * weights + leaf.flatten(1).square()).mean()


def own_loss(output: Any) -> Tensor:
    """Returns the loss that the model has computed from its labels."""
    loss: Tensor = output["loss"]
    return loss


class Made(NamedTuple):
    """A model, and the keyword arguments of one call of it."""

    model: nn.Module
    batch: dict[str, Any]


@dataclass(frozen=True)
class Whole:
    """An argument without rows, which each micro-batch gets whole."""

    value: Tensor


@dataclass(frozen=True, eq=False)
class Family:
    """A tiny model of a family, and where it is cut."""

    name: str
    make: Callable[[], Made]
    """Draws the parameters and the batch from the default generator; downloads nothing."""
    cuts: tuple[str, ...]
    """The modules with which the second and later partitions begin."""
    library: str = ""
    """The library of the model, if not torch."""
    loss: Callable[[Any], Tensor] = everything
    """Maps the output of a batch or micro-batch to a mean over its rows."""
    example: dict[str, Any] | None = None
    """Arguments that show the order of calls, if it differs from the order of the modules."""
    mixes_rows: str = ""
    """Why the result of a row depends on other rows, so that micro-batches differ from a batch."""
    whole_rows: str = ""
    """Why micro-batches of unequal size cannot be joined."""
    never_drops: str = ""
    """Why no part of the model may draw random numbers."""
    why_not: str = ""
    """Why the model cannot run."""
    notes: str = ""
    seldom: bool = True
    """Whether to leave it out of the tests without ``--sweep``."""

    def __repr__(self) -> str:
        return self.name


def library(name: str) -> Any:
    """Imports a library; skips the test if it is missing."""
    return pytest.importorskip(name, reason=f"the model is one of {name}")


def made(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float64) -> Made:
    """Adds noise to the parameters, so that no gradient vanishes by symmetry.

    Initial weights and biases of zero and scales of one would hide lost gradients.
    """
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return Made(model, tree_map(lambda leaf: _as_dtype(leaf, dtype), batch))


def _as_dtype(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


# Batches ------------------------------------------------------------------------------------------


def tokens(length: int = 6, *names: str, padded: bool = False) -> dict[str, Tensor]:
    """Draws rows of ``length`` tokens, as ``input_ids`` and the other ``names``.

    If ``padded``, rows differ in their number of tokens, and there is an attention mask.
    """
    batch = {
        name: torch.randint(3, VOCABULARY, (ROWS, length)) for name in ("input_ids", *names)
    }
    if padded:
        lengths = length - torch.arange(ROWS) % (length // 2)
        batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    return batch


def pixels(size: int, channels: int = 3) -> Tensor:
    return torch.randn(ROWS, channels, size, size)


def images(size: int, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": pixels(size, channels)}
