"""Joins the outputs of the micro-batches into the output of the mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipert._typing import Value
from pipert.batch.tensors import describe, tensors_of
from pipert.batch.trees import (
    REMEDY,
    flatten,
    has_rows,
    held_by,
    is_whole,
    is_whole_in_rows,
    paths_of,
    unflatten,
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
    several = len(outputs) > 1 and bool(sizes)
    for rows in (sizes, [-1] * len(sizes)) if several else ([0] * len(outputs),):
        found = [flatten(y, partial(_is_leaf, n)) for y, n in zip(outputs, rows, strict=True)]
        spec = found[0][1]
        others = [i for i, (_, each) in enumerate(found) if each != spec]
        if not others:
            break
    for i in others[:1]:
        raise ValueError(
            "the last layer must return the same structure for each micro-batch, but returned "
            f"{describe(first)} for micro-batch 0 and {describe(outputs[i])} for micro-batch {i}"
        )
    columns = [list(column) for column in zip(*[leaves for leaves, _ in found], strict=True)]
    _refuse_time_first(columns, first, sizes)
    joined = [
        _join_lists(column, sizes, join_numbers)
        if isinstance(column[0], list)
        else _join(column, outputs, k, sizes, join_numbers)
        for k, column in enumerate(columns)
    ]
    return unflatten(spec, iter(joined))


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

    It may be a list with one entry for each of ``rows``, such as the boxes and scores in an image.
    """
    found = (is_whole_in_rows if rows else is_whole)(value)
    if found or type(value) is not list or not rows or len(value) != rows:
        return found
    has_rows = any(not isinstance(entry, Tensor) or entry.dim() for entry in value)
    return has_rows and all(tensors_of(entry)[0] for entry in value)


def _join_lists(
    column: list[list[Value]], sizes: Sequence[int], join_numbers: JoinNumbers | None
) -> list[Value]:
    """Join lists, each with as many entries as its micro-batch has rows.

    The entries are rows, unless they are tensors that have the rows, such as features.

    Raises:
        ValueError: they are containers of such tensors.
    """
    lengths = [[len(t) if t.dim() else 0 for t in tensors_of(each)[0]] for each in column]
    pairs = list(zip(lengths, sizes, strict=True))
    if any(isinstance(entry, Tensor) for entry in column[0]):
        if len(set(sizes)) == 1 and all(
            rows in each and not any(n % rows for n in each) for each, rows in pairs
        ):
            entries = map(list, zip(*column, strict=True))
            return [gather(each, sizes, join_numbers) for each in entries]
    elif all(set(each) == {rows} for each, rows in pairs):
        raise ValueError(
            f"the last layer returned a list of {sizes[0]} containers for a micro-batch of "
            f"{sizes[0]} rows, and each tensor in them has {sizes[0]} entries, so it is unclear "
            "whether these or the entries of the list are the rows; return a tuple if the entries "
            "are not"
        )
    return [entry for entries in column for entry in entries]


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
    return f"output{[*paths_of(flatten(output, is_whole)[1])][k]}"
