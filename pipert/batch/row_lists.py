"""Finds lists with one entry for each row among the arguments of a call.

Tensors are split along dimension 0, but the images of a detector, its targets, or the texts of an
encoder are often lists. A list whose length is the number of rows is split between its entries, if
each contains a string, or tensors that are not all of as many rows themselves. A tuple is never
split. What cannot be told apart is refused: each micro-batch would get the rows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from pipert.batch.trees import flatten, is_whole

__all__: list[str] = []

_REMEDY = (
    "so it is unclear whether these entries are the rows; pass a tensor to split it, or a tuple or "
    "Replicate(...) if the entries are no rows"
)


def leaf_test(arguments: Any) -> Callable[[Any], bool]:
    """Return the test for what is split, or sent, as a whole: also lists with an entry a row."""
    leaves = flatten(arguments, _is_list_or_whole)[0]
    rows = _number_of_rows(leaves) if list in map(type, leaves) else None
    if rows is None or rows < 2:
        return is_whole

    def is_leaf(value: Any) -> bool:
        if type(value) is not list or len(value) != rows:
            return is_whole(value)
        return all([_sizes(entry) or _kinds(entry) & {str, int, float} for entry in value])

    return is_leaf


def _is_list_or_whole(value: Any) -> bool:
    return type(value) is list or is_whole(value)


def _number_of_rows(leaves: Iterable[Any]) -> int | None:
    """Return the number of rows of arguments, of which lists are leaves; ``None`` if unknown.

    It is that of the first tensor outside of lists; or of those inside, if they agree; else the
    length of the first list that contains tensors.
    """
    length: int | None = None
    inside: set[int] = set()
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
        if type(leaf) is list and (found := _sizes(leaf)):
            length = len(leaf) if length is None else length
            inside |= found
    return length if len(inside) > 1 else next(iter(inside), None)


def refuse_unclear(path: Callable[[int], str], k: int, rows: list[Any]) -> None:
    """Refuse a list whose entries need not be the rows.

    Raises:
        ValueError: its entries are numbers, or contain tensors of as many rows.
    """
    if _sizes(rows) == {len(rows)}:
        raise ValueError(
            f"{path(k)} is a list of {len(rows)} entries, whose tensors all have {len(rows)} rows, "
            + _REMEDY
        )
    if not all([_sizes(entry) or str in _kinds(entry) for entry in rows]):
        raise ValueError(
            f"{path(k)} is a list of {len(rows)} entries, some of them numbers, for {len(rows)} "
            "rows, " + _REMEDY
        )


def _sizes(value: Any) -> set[int]:
    """Return the numbers of rows of the tensors in ``value``."""
    leaves = flatten(value)[0]
    return {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0}


def _kinds(value: Any) -> set[type]:
    return set(map(type, flatten(value)[0]))
