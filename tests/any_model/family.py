"""What is known of a family of models that a pipe takes as they are."""

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
"""Of a batch; in four micro-batches."""
VOCABULARY = 40


def everything(output: Any) -> Tensor:
    """A mean over the rows to which each entry of each tensor contributes differently."""
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
    """The one that the model has computed from its labels."""
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
    """Draws the parameters and the batch by the default generator; downloads nothing."""
    cuts: tuple[str, ...]
    """The modules that the second partition and those after it begin with."""
    library: str = ""
    """That has it, other than torch."""
    loss: Callable[[Any], Tensor] = everything
    """Of an output, or of a micro-batch's: a mean over the rows."""
    example: dict[str, Any] | None = None
    """Arguments that say in which order layers are called, where that is not how they stand."""
    mixes_rows: str = ""
    """Why what a row gets depends on the others, so that a micro-batch is not a part of a batch."""
    whole_rows: str = ""
    """Why micro-batches of unequal size cannot be joined."""
    never_drops: str = ""
    """Why nothing in it may draw random numbers."""
    why_not: str = ""
    """It cannot run."""
    notes: str = ""
    seldom: bool = True
    """Left out of a run of the tests without ``--sweep``."""

    def __repr__(self) -> str:
        return self.name


def library(name: str) -> Any:
    """A library that a test may be skipped without."""
    return pytest.importorskip(name, reason=f"the model is one of {name}")


def made(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float64) -> Made:
    """The model without the symmetry of its initialisation, in which gradients vanish.

    Weights of zero, biases of zero and scales of one hide what is lost on the way.
    """
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return Made(model, tree_map(lambda leaf: _of(leaf, dtype), batch))


def _of(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


# Batches ------------------------------------------------------------------------------------------


def tokens(length: int = 6, *names: str, padded: bool = False) -> dict[str, Tensor]:
    """Rows of ``length`` tokens, as ``input_ids`` and the other ``names``.

    If they are ``padded`` each row has another number of tokens, and a mask that says so.
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
