"""Finds objects among a layer's arguments that the layer changes, such as a key-value cache.

A recomputed call would find the object changed and change it again: attention would see each key
twice. Lists and dicts may change: the recomputation gets copies of them from before the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from pipert.batch.tensors import version
from pipert.batch.trees import CLOSED, ORDINARY, held_by

__all__: list[str] = []

Objects = list[tuple[Any, list[tuple[Tensor, int]]]]


def objects_in(values: Iterable[Any]) -> Objects:
    """Return the objects among arguments, each with the tensors in it and their versions."""
    return [(value, _versions(value)) for value in _objects(values)]


def refuse_changes(objects: Objects) -> None:
    """Refuse a layer that has changed one of the objects that were found before its call.

    Raises:
        RuntimeError: a tensor in one of them has been changed, replaced, added or removed.
    """
    for value, before in objects:
        if [(id(x), old) for x, old in before] != [(id(x), now) for x, now in _versions(value)]:
            raise RuntimeError(
                f"a layer changes its argument, a {type(value).__qualname__}, and would do so "
                "again when it is recomputed; avoid that (models of transformers take "
                "use_cache=False), exempt it with pipert.never_recompute (as layers that hand keys "
                "and values to later ones, in Gemma3n), or use checkpoint='never'"
            )


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    tensors = {id(part): part for part in held_by(value) if isinstance(part, Tensor)}
    return [(tensors[number], version(tensors[number])) for number in sorted(tensors)]


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        kind = type(value)
        if kind is tuple or kind is list:
            yield from _objects(value)
        elif kind is dict:
            yield from _objects(value.values())
        elif kind not in ORDINARY and not isinstance(value, CLOSED):
            yield value
