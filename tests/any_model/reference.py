"""Computes the plain model's results, micro-batch by micro-batch, as the reference for a pipe.

If a model mixes rows, as batch normalisation does, its result for a micro-batch is not a part of
its result for the batch. So the plain model, too, is called once for each micro-batch, and the
gradients are added up, each weighted by the micro-batch's share of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.any_model.family import Whole

__all__ = [
    "Result", "detached", "first_rows", "join", "loss_of", "reference", "rows_of", "sizes_of",
    "split", "state_of",
]  # fmt: skip


class Result(NamedTuple):
    """The result of a step; tensors have no graph."""

    output: Any
    loss: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def reference(
    model: nn.Module, batch: dict[str, Any], loss: Callable[[Any], Tensor], chunks: int
) -> Result:
    """Takes a step of the plain model over ``chunks`` micro-batches."""
    sizes = sizes_of(batch, chunks)
    total = torch.zeros(())
    outputs = []
    for micro_batch, size in zip(split(batch, sizes), sizes, strict=True):
        output = model(**micro_batch)
        part = loss(output) * (size / sum(sizes))
        part.backward()  # type: ignore[no-untyped-call]
        total = total + part.detach()
        outputs.append(detached(output))
    return Result(join(outputs), total, *state_of(model))


def state_of(model: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Returns the model's gradients and copies of its buffers."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads, {name: buffer.clone() for name, buffer in model.named_buffers()}


def rows_of(batch: dict[str, Any]) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if _has_rows(leaf))


def first_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """Cuts a batch to its first ``rows`` rows."""
    return _map(batch, lambda leaf: leaf[:rows])


def sizes_of(batch: dict[str, Any], chunks: int) -> list[int]:
    """Returns the number of rows of each micro-batch; the numbers differ by one at most."""
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
    """Joins micro-batches: concatenates rows, stacks scalars, takes other leaves from the first."""
    if len(outputs) == 1:
        return outputs[0]
    spec = tree_flatten(outputs[0])[1]
    columns = zip(*map(tree_leaves, outputs), strict=True)
    return tree_unflatten([_join(list(column)) for column in columns], spec)


def _join(column: list[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(column) if column[0].dim() else torch.stack(column)


def loss_of(output: Any, sizes: Sequence[int], loss: Callable[[Any], Tensor]) -> Tensor:
    """Computes a batch's loss, a mean over its rows, from a joined output."""
    if len(sizes) == 1:
        return loss(output)
    rows = sum(sizes)
    leaves, spec = tree_flatten(output)
    parts = [[_part(leaf, i, sizes) for leaf in leaves] for i in range(len(sizes))]
    losses = [loss(tree_unflatten(part, spec)) for part in parts]
    shares = [part * (size / rows) for part, size in zip(losses, sizes, strict=True)]
    return torch.stack(shares).sum()


def _part(leaf: Any, i: int, sizes: Sequence[int]) -> Any:
    """Returns the part of micro-batch ``i``; stacked scalars have one entry per micro-batch."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.shape == (len(sizes),):
        return leaf[i]
    each = len(leaf) // sum(sizes)  # the leaf's rows per row of the batch
    start = sum(sizes[:i]) * each
    return leaf[start : start + sizes[i] * each]


def detached(output: Any) -> Any:
    """Returns the output with its tensors detached from their graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _unwrap(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Whole) else leaf


def _map(batch: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Applies ``change`` to each tensor that has rows."""
    return {
        name: tree_map(lambda leaf: change(leaf) if _has_rows(leaf) else leaf, value)
        for name, value in batch.items()
    }
