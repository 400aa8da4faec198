"""Joins the outputs of the micro-batches into the output of the mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipert._torch import pytree
from pipert._typing import Value
from pipert.batch.tensors import describe, tensors_of
from pipert.batch.trees import (
    REMEDY,
    flatten,
    has_rows,
    held_by,
    is_whole,
    is_whole_in_rows,
    path_of,
)

JoinNumbers = Callable[[Sequence[Tensor]], Tensor]
"""Joins 0-dimensional tensors, one of each micro-batch."""


def gather(
    outputs: list[Value], sizes: Sequence[int] = (), join_numbers: JoinNumbers | None = None
) -> Value:
    """Join the outputs of the micro-batches, whose structure must be the same.

    Tensors are concatenated along dimension 0, 0-dimensional ones stacked to shape ``(m,)``; other
    leaves must be equal and are returned once. ``sizes`` are the micro-batches' numbers of rows: in
    all of them, an output must have the same multiple of that number. A list with one entry for
    each row, as detectors return, is joined to such a list. With ``join_numbers``, which joins
    those of several micro-batches, 0-dimensional tensors are not stacked.
    """
    first = outputs[0]
    if len(outputs) == 1 and join_numbers is not None:
        return first
    if isinstance(first, Tensor) and all([isinstance(output, Tensor) for output in outputs]):
        _refuse_time_first([outputs], first, sizes)
        return _join(outputs, outputs, 0, sizes, join_numbers)
    rows = sizes if len(outputs) > 1 and sizes else [0] * len(outputs)
    leaves, spec = flatten(first, partial(_is_leaf, rows[0]))
    columns = [[leaf] for leaf in leaves]
    for i, output in enumerate(outputs[1:], start=1):
        leaves, other_spec = flatten(output, partial(_is_leaf, rows[i]))
        if other_spec != spec:
            raise ValueError(
                "the last layer must return the same structure for each micro-batch, but returned "
                f"{spec} for micro-batch 0 and {other_spec} for micro-batch {i}"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    _refuse_time_first(columns, first, sizes)
    joined = [
        [entry for entries in column for entry in entries]
        if isinstance(column[0], list)
        else _join(column, outputs, k, sizes, join_numbers)
        for k, column in enumerate(columns)
    ]
    return pytree.tree_unflatten(joined, spec)


def _refuse_time_first(columns: list[list[Any]], output: Value, sizes: Sequence[int]) -> None:
    """Refuse outputs of which none has its rows in dimension 0, and one in dimension 1.

    One of two dimensions may be (rows * time, classes), with as many classes as rows.
    """
    shapes = [[leaf.shape for leaf in each if isinstance(leaf, Tensor)] for each in columns]
    rows = [(size,) for size in sizes]
    if len(rows) > 1 and rows not in [[shape[:1] for shape in each] for each in shapes]:
        for k, each in enumerate(shapes):
            if [shape[1:2] for shape in each if len(shape) > 2] == rows:
                raise ValueError(
                    f"{_path(output, k)} has the rows of the micro-batch in dimension 1, and "
                    "outputs are joined along dimension 0; let the last layer transpose it"
                )


def _is_leaf(rows: int, value: Value) -> bool:
    """Return whether a part of an output is joined as a whole.

    It may be a list with one entry for each of ``rows``, each a container of tensors, such as the
    boxes and scores in an image.

    Raises:
        ValueError: the tensors in the entries might be rows themselves.
    """
    found = (is_whole_in_rows if rows else is_whole)(value)
    if found or type(value) is not list or not rows or len(value) != rows:
        return found
    tensors = [tensors_of(entry)[0] for entry in value]
    if not all(tensors) or any(isinstance(entry, Tensor) for entry in value):
        return False
    if all([tensor.dim() > 0 and len(tensor) == rows for each in tensors for tensor in each]):
        raise ValueError(
            f"the last layer returned a list of {rows} containers for a micro-batch of {rows} "
            f"rows, and each tensor in them has {rows} entries, so it is unclear whether these or "
            "the entries of the list are the rows; return a tuple if the entries are not"
        )
    return True


def _join(
    column: list[Any],
    outputs: list[Value],
    k: int,
    sizes: Sequence[int],
    join_numbers: JoinNumbers | None,
) -> Any:
    first = column[0]
    if len(column) == 1 and not isinstance(first, Tensor):
        return first
    if all([isinstance(leaf, Tensor) for leaf in column]):
        if sizes and len(column) > 1 and all([leaf.dim() > 0 for leaf in column]):
            rows = list(map(len, column))
            each, rest = divmod(rows[0], sizes[0])
            if rest or rows != [each * size for size in sizes]:
                raise ValueError(
                    f"{_path(outputs[0], k)} must have as many rows (dimension 0) as the "
                    f"micro-batch, or a fixed multiple of that, but has {rows} in micro-batches of "
                    f"{list(sizes)} rows; return a 0-dimensional tensor to have one value for each "
                    "micro-batch"
                )
        kinds = {(leaf.dim() > 0, leaf.shape[1:], leaf.dtype, leaf.device) for leaf in column}
        if len(kinds) > 1:
            raise ValueError(
                f"{_path(outputs[0], k)} must have one shape beyond its rows, one dtype and one "
                "device in all micro-batches, got "
                + ", ".join(sorted({f"{describe(leaf)} on {leaf.device}" for leaf in column}))
                + "; return rows of equal shape, or a 0-dimensional tensor"
            )
        if len(column) == 1 and first.dim() > 0:
            return first
        # The last layer may have enabled gradients itself.
        has_graph = any([leaf.requires_grad for leaf in column])
        with torch.set_grad_enabled(torch.is_grad_enabled() or has_graph):
            if first.dim() > 0:
                return torch.cat(column)
            if join_numbers is None:
                return torch.stack(column)
            return join_numbers(column)
    for leaf in column:
        if not isinstance(leaf, Tensor) and any(map(has_rows, (leaf, *held_by(leaf)))):
            raise ValueError(
                f"{_path(outputs[0], k)} is a {type(leaf).__qualname__}, which has rows that "
                f"pipert cannot join; {REMEDY}, or let the last layer return None for it"
            )
    for i, leaf in enumerate(column[1:], start=1):
        if not _equal(first, leaf):
            raise ValueError(
                f"{_path(outputs[0], k)} is not a tensor; it must be equal in all micro-batches, "
                f"but is {first!r} in micro-batch 0 and {leaf!r} in micro-batch {i}; return a "
                "tensor to have one value for each micro-batch"
            )
    return first


def _equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    try:
        both_nan = bool(first != first) and bool(other != other)
        return type(first) is type(other) and (both_nan or bool(first == other))
    except (TypeError, ValueError, RuntimeError):  # such as the truth of an array
        return False


def _path(output: Value, k: int) -> str:
    """Return the path to the ``k``-th leaf as a user writes it, such as ``output[0]['mask']``."""
    path = path_of(output, k)
    return f"leaf {k} of the output" if path is None else f"output{path}"
