"""Refuses in-place changes of tensors of one value that overlap in memory.

In the plain module such a change affects the other tensor too, its value and its graph. Here each
tensor may have been detached, cloned or copied separately. The same tensor twice is no problem: it
stays one (``batch.tensors``). Overlapping tensors may be read. So only a change is refused, once
the layers have made it.

1. Tensors that share a storage are found before a value enters a stage, while it is as it was sent.
2. Their versions tell whether the layers have changed them. Inference tensors have none.
3. Only then are changed tensors tested for overlap, byte by byte.
4. Without a graph, tensors that still share their storage behave as in the plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from pipert._torch import storage_of
from pipert._typing import Value
from pipert.batch.tensors import describe, tensors_of, version
from pipert.skip.store import parts_of


class Extent(NamedTuple):
    """The bytes of its storage that a tensor covers."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Shared = dict[tuple[int, int], tuple[Extent, Extent]]
"""Pairs of tensors of a value that share a storage, by number, with their extents in it."""


def find_shared(value: Value) -> Shared:
    """Find the pairs of tensors in a value that share a storage."""
    tensors = tensors_of(value)[0]
    homes = {k: storage_of(x) for k, x in enumerate(tensors) if _has_storage(x)}
    if len({*homes.values()}) == len(homes):
        return {}
    return {
        (k, other): (_extent(tensors[k]), _extent(tensors[other]))
        for k, other in combinations(homes, 2)
        if homes[k] == homes[other]
    }


def compute_watching(
    shared: Sequence[Shared], compute: Callable[[Value], Value], x: Value
) -> Value:
    """Return ``compute(x)``.

    Args:
        shared: the tensors that share memory in each part of ``x``.
        compute: computes layers.
        x: their input.

    Raises:
        RuntimeError: one tensor of an overlapping pair was changed in place.
    """
    is_apart, watched = torch.is_grad_enabled(), []
    for part, pairs in zip(parts_of(x), shared, strict=False):
        tensors = tensors_of(part)[0]
        for (k, other), extents in pairs.items():
            pair = tensors[k], tensors[other]
            if is_apart or storage_of(pair[0]) != storage_of(pair[1]):  # rule 4
                watched.append((pair, [*map(version, pair)], extents))
    y = compute(x)
    for pair, before, extents in watched:
        if [*map(version, pair)] != before and _overlap(*extents):
            raise RuntimeError(
                f"two tensors that came here in one value, {describe(pair[0])} and "
                f"{describe(pair[1])}, share memory, and one was changed in place: the plain "
                "module changes both, and here they are apart. Let the layer that they come from "
                "return a clone of one, or change a copy (inplace=False)"
            )
    return y


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.numel() > 0


def _extent(tensor: Tensor) -> Extent:
    size = tensor.element_size()
    strides = tuple([int(stride) * size for stride in tensor.stride()])
    return Extent(int(tensor.storage_offset()) * size, (*tensor.shape, size), (*strides, 1))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have a byte in common."""
    if not (_has_storage(one) and _has_storage(other)):
        return False
    together = storage_of(one) == storage_of(other)
    return together and _overlap(_extent(one), _extent(other))


def _overlap(one: Extent, other: Extent) -> bool:
    start, *_ = begins = sorted((one.offset, other.offset))
    ends = [
        extent.offset + 1 + sum((n - 1) * s for n, s in zip(extent.shape, extent.strides))
        for extent in (one, other)
    ]
    if min(ends) <= max(begins):
        return False
    taken = torch.zeros(max(ends) - start, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.strides, one.offset - start).fill_(True)
    return bool(taken.as_strided(other.shape, other.strides, other.offset - start).any())
