"""Checkpoints a model with its own ``forward``: each call of a layer is a segment.

The standard way is to run the forward again. A ``forward`` whose stack spans all partitions cannot
be run from the middle, so the calls of layers are recomputed instead: ``R[i,j]`` repeats those of
partition *j* in order. The model's own code keeps the tensors it saves, as without checkpointing.
A chain of layers saves only what a partition of an ``nn.Sequential`` saves: its first input.

A layer that changes its argument in place cannot be repeated. One that declares so (by
``inplace=True``, or an ``nn.Sequential`` that begins with such a layer) is not recorded, and keeps
the tensors it saves, like the model's own code. Others are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from pipert._typing import Value
from pipert.batch.tensors import in_same_object, version
from pipert.batch.trees import CLOSED, ORDINARY, held_by
from pipert.recompute.segment import Compute, Drawing, Segments


def checkpointed_call(
    segments: Segments, name: str, compute: Compute, drawing: Drawing, args: Any, kwargs: Any
) -> Value:
    """Call a layer as a segment.

    Args:
        segments: those of the partition.
        name: the layer's name in errors.
        compute: calls the layer, in ``F`` and ``R``.
        drawing: makes the block in which ``R`` draws; ``None`` if no layer draws.
        args, kwargs: the layer's arguments.

    Raises:
        RuntimeError: the layer has changed an argument.
    """
    objects = objects_in((*args, *kwargs.values()))
    returned: list[Value] = []

    def first(value: Value) -> Value:
        returned.append(compute(value))
        return returned[0]

    y = segments.call(name, first, compute, drawing, (args, kwargs), copies=False)
    refuse_changes(objects)
    return in_same_object(returned[0], y)


Objects = list[tuple[Any, list[tuple[Tensor, int]]]]


def objects_in(values: Iterable[Any]) -> Objects:
    """Return the objects among arguments, each with the tensors in it and their versions.

    A recomputed call would find an object, such as a key-value cache, changed by its forward, and
    change it again. Lists and dicts may change: the recomputation gets those from before the call.
    """
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
