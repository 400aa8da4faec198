"""The plain model's results, micro-batch for micro-batch: what those of a pipe are compared with.

Where a model mixes rows, as normalisation over the batch does, its result for a micro-batch is not
a part of that for the batch. So the plain model, too, is called once for each micro-batch, and the
gradients are added up, each micro-batch's by its share of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.any_model.family import Whole

__all__ = ["Result", "first_rows", "join", "loss_of", "reference", "rows_of", "sizes_of", "split"]


class Result(NamedTuple):
    """Of a step; tensors without a graph."""

    output: Any
    loss: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def reference(
    model: nn.Module, batch: dict[str, Any], loss: Callable[[Any], Tensor], chunks: int
) -> Result:
    """A step of the plain model over ``chunks`` micro-batches."""
    sizes = sizes_of(batch, chunks)
    total = torch.zeros(())
    outputs = []
    for micro_batch, size in zip(split(batch, sizes), sizes, strict=True):
        output = model(**micro_batch)
        part = loss(output) * (size / sum(sizes))
        part.backward()  # type: ignore[no-untyped-call]
        total = total + part.detach()
        outputs.append(_detached(output))
    return Result(join(outputs), total, *state_of(model))


def state_of(model: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Gradients and buffers."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads, {name: buffer.clone() for name, buffer in model.named_buffers()}


def rows_of(batch: dict[str, Any]) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if _has_rows(leaf))


def first_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """A smaller batch."""
    return _map(batch, lambda leaf: leaf[:rows])


def sizes_of(batch: dict[str, Any], chunks: int) -> list[int]:
    """The rows of each micro-batch: as many, or one less."""
    rows = rows_of(batch)
    return [rows // chunks + (i < rows % chunks) for i in range(chunks)]


def split(batch: dict[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = []
    for start, size in zip(starts, sizes, strict=True):
        parts.append(tree_map(_unwrap, _map(batch, partial(_slice, start, start + size))))
    return parts


def _slice(start: int, end: int, leaf: Tensor) -> Tensor:
    return leaf[start:end].clone()


def join(outputs: list[Any]) -> Any:
    """The output of the batch: rows one after the other, scalars as a vector, others as is."""
    spec = tree_flatten(outputs[0])[1]
    columns = zip(*map(tree_leaves, outputs), strict=True)
    return tree_unflatten([_join(list(column)) for column in columns], spec)


def _join(column: list[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(column) if column[0].dim() else torch.stack(column)


def loss_of(output: Any, sizes: Sequence[int], loss: Callable[[Any], Tensor]) -> Tensor:
    """The loss of a batch from an output that is joined: the mean over its rows."""
    rows = sum(sizes)
    leaves, spec = tree_flatten(output)
    parts = [[_part(leaf, i, sizes) for leaf in leaves] for i in range(len(sizes))]
    losses = [loss(tree_unflatten(part, spec)) for part in parts]
    shares = [own * (size / rows) for own, size in zip(losses, sizes, strict=True)]
    return torch.stack(shares).sum()


def _part(leaf: Any, i: int, sizes: Sequence[int]) -> Any:
    """Micro-batch ``i``'s: of a scalar in each there is a vector of as many as micro-batches."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.shape == (len(sizes),):
        return leaf[i]
    each = len(leaf) // sum(sizes)  # rows of it for a row of the batch
    start = sum(sizes[:i]) * each
    return leaf[start : start + sizes[i] * each]


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _unwrap(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Whole) else leaf


def _map(batch: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Changes what has rows."""
    return {
        name: tree_map(lambda leaf: change(leaf) if _has_rows(leaf) else leaf, value)
        for name, value in batch.items()
    }
