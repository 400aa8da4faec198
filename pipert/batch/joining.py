"""Joins the outputs of the micro-batches into the output of the mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipert._typing import Value
from pipert.batch.tensors import describe, tensors_of
from pipert.batch.trees import (
    REMEDY,
    Node,
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
    if len(outputs) == 1:
        sizes = ()
        if join_numbers is not None:
            return outputs[0]
    if sizes:
        _refuse_time_first(outputs, sizes)
    return _join("output", outputs, sizes, join_numbers)


def _refuse_time_first(outputs: list[Value], sizes: Sequence[int]) -> None:
    """Refuse outputs of which none has its rows in dimension 0, and one in dimension 1.

    One of two dimensions may be (rows * time, classes), with as many classes as rows.
    """
    columns = [*zip(*[tensors_of(output)[0] for output in outputs])]
    rows = [(size,) for size in sizes]
    if rows not in [[x.shape[:1] for x in column] for column in columns]:
        for column in columns:
            if [x.shape[1:2] for x in column if x.dim() > 2] == rows:
                raise ValueError(
                    f"an output, {describe(column[0])}, has the rows of the micro-batch in "
                    "dimension 1, and outputs are joined along dimension 0; let the last layer "
                    "transpose it"
                )


def _join(
    path: str, parts: list[Any], sizes: Sequence[int], join_numbers: JoinNumbers | None
) -> Value:
    """Join one part of each output; ``path`` names it as a user writes it."""
    first = parts[0]
    if all([isinstance(part, Tensor) for part in parts]):
        return _join_tensors(path, parts, sizes, join_numbers)
    if sizes and all(map(_is_list_of_rows, parts, sizes)):
        return _join_lists(path, parts, sizes, join_numbers)
    found = [_children(part, is_whole_in_rows if sizes else is_whole) for part in parts]
    node = found[0][1]
    for i, (_, other) in enumerate(found):
        if other != node:
            raise ValueError(
                "the last layer must return the same structure for each micro-batch, but for "
                f"{path} returned {describe(first)} in micro-batch 0 and {describe(parts[i])} in "
                f"micro-batch {i}"
            )
    if node is not None:
        columns = zip(paths_of(node), *[leaves for leaves, _ in found], strict=True)
        joined = [_join(path + step, each, sizes, join_numbers) for step, *each in columns]
        return unflatten(node, iter(joined))
    if len(parts) > 1:
        _check_equal(path, parts)
    return first


def _children(
    value: Value, is_leaf: Callable[[Any], bool]
) -> tuple[list[Value], Node | None]:
    return flatten(value, lambda part: part is not value or is_leaf(part))


def _is_list_of_rows(value: Value, rows: int) -> bool:
    """Return whether a list has one entry for each row, such as the boxes found in an image."""
    if type(value) is not list or len(value) != rows:
        return False
    has_rows = any(not isinstance(entry, Tensor) or entry.dim() for entry in value)
    return has_rows and all(tensors_of(entry)[0] for entry in value)


def _join_lists(
    path: str, parts: list[list[Value]], sizes: Sequence[int], join_numbers: JoinNumbers | None
) -> list[Value]:
    """Join lists, each with as many entries as its micro-batch has rows.

    The entries are rows, unless they are tensors that have the rows, such as features.

    Raises:
        ValueError: they are containers of such tensors.
    """
    lengths = [[len(t) if t.dim() else 0 for t in tensors_of(each)[0]] for each in parts]
    pairs = list(zip(lengths, sizes, strict=True))
    if any(isinstance(entry, Tensor) for entry in parts[0]):
        if len(set(sizes)) == 1 and all(
            rows in each and not any(n % rows for n in each) for each, rows in pairs
        ):
            columns = enumerate(zip(*parts, strict=True))
            return [_join(f"{path}[{k}]", [*each], sizes, join_numbers) for k, each in columns]
    elif all(set(each) == {rows} for each, rows in pairs):
        raise ValueError(
            f"the last layer returned a list of {sizes[0]} containers for a micro-batch of "
            f"{sizes[0]} rows, and each tensor in them has {sizes[0]} entries, so it is unclear "
            "whether these or the entries of the list are the rows; return a tuple if the entries "
            "are not"
        )
    return [entry for entries in parts for entry in entries]


def _join_tensors(
    path: str, parts: list[Tensor], sizes: Sequence[int], join_numbers: JoinNumbers | None
) -> Tensor:
    first = parts[0]
    if len(parts) == 1 and first.dim() > 0:
        return first
    if sizes and all([part.dim() > 0 for part in parts]):
        rows = list(map(len, parts))
        each, rest = divmod(rows[0], sizes[0])
        if rest or rows != [each * size for size in sizes]:
            raise ValueError(
                f"{path} must have as many rows (dimension 0) as the micro-batch, or a fixed "
                f"multiple of that, but has {rows} in micro-batches of {list(sizes)} rows; return "
                "a 0-dimensional tensor to have one value for each micro-batch"
            )
    if len({(part.dim() > 0, part.shape[1:], part.dtype, part.device) for part in parts}) > 1:
        raise ValueError(
            f"{path} must have one shape beyond its rows, one dtype and one device in all "
            "micro-batches, got "
            + ", ".join(sorted({f"{describe(part)} on {part.device}" for part in parts}))
            + "; return rows of equal shape, or a 0-dimensional tensor"
        )
    # The last layer may have enabled gradients itself.
    has_graph = any([part.requires_grad for part in parts])
    with torch.set_grad_enabled(torch.is_grad_enabled() or has_graph):
        if first.dim() > 0:
            return torch.cat(parts)
        return torch.stack(parts) if join_numbers is None else join_numbers(parts)


def _check_equal(path: str, parts: list[Any]) -> None:
    for part in parts:
        if not isinstance(part, Tensor) and any(map(has_rows, (part, *held_by(part)))):
            raise ValueError(
                f"{path} is a {type(part).__qualname__}, which has rows that pipert cannot join; "
                f"{REMEDY}, or let the last layer return None for it"
            )
    for i, part in enumerate(parts[1:], start=1):
        if not _equal(parts[0], part):
            raise ValueError(
                f"{path} is not a tensor; it must be equal in all micro-batches, but is "
                f"{parts[0]!r} in micro-batch 0 and {part!r} in micro-batch {i}; return a tensor "
                "to have one value for each micro-batch"
            )


def _equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    try:
        both_nan = bool(first != first) and bool(other != other)
        return type(first) is type(other) and (both_nan or bool(first == other))
    except (TypeError, ValueError, RuntimeError):  # such as the truth of an array
        return False
