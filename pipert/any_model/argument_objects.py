"""Refuses layers that change an object among their arguments, such as a key-value cache.

A recomputed call would find the object changed and change it again: attention would see each key
twice. So a layer that changes one is refused when it first does so. Lists and dicts may change: the
recomputation gets copies of them from before the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from pipert.batch.hidden import CLOSED, versions
from pipert.batch.trees import ORDINARY

__all__: list[str] = []


class ArgumentObjects:
    """The objects among the arguments of a call, with the tensors in them before the call.

    Args:
        values: the arguments of the call.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._before = [(value, versions(value)) for value in _objects(values)]

    def refuse_changes(self) -> None:
        """Compare the objects after the call.

        Raises:
            RuntimeError: a tensor in one of them has been changed, replaced, added or removed.
        """
        for value, before in self._before:
            if not _are_alike(before, versions(value)):
                raise RuntimeError(
                    f"a layer changes its argument, a {type(value).__qualname__}, and would do so "
                    "again when it is recomputed; avoid that (models of transformers take "
                    "use_cache=False), or use checkpoint='never'"
                )


def _are_alike(before: list[tuple[Tensor, int]], after: list[tuple[Tensor, int]]) -> bool:
    return len(before) == len(after) and all(
        x is y and old == new for (x, old), (y, new) in zip(before, after, strict=True)
    )


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        kind = type(value)
        if kind in ORDINARY:
            continue
        if kind is tuple or kind is list:
            yield from _objects(value)
        elif kind is dict:
            yield from _objects(value.values())
        elif not isinstance(value, CLOSED):
            yield value
