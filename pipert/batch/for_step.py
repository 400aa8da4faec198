"""Splits the arguments and the target of a step, or takes micro-batches that are ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pipert._typing import Value
from pipert.batch.microbatch import TARGET, as_value, ready, scatter_with_sizes

__all__: list[str] = []


class Batch(NamedTuple):
    """The micro-batches of a step."""

    inputs: list[Any]
    targets: Sequence[Value]
    sizes: Sequence[int]
    """The numbers of rows; empty if the micro-batches came ready, and may have none."""


def split_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Value, chunks: int
) -> Batch:
    """Split the arguments of a step.

    Raises:
        ValueError: arguments and target disagree on the number of rows.
        TypeError: an argument hides rows that cannot be split.
    """
    split, sizes = scatter_with_sizes(args, {**kwargs, TARGET: target}, chunks)
    inputs, targets = [], []
    for micro_batch in split:
        keywords = dict(micro_batch.kwargs)
        targets.append(keywords.pop(TARGET))
        inputs.append(as_value(micro_batch.args, keywords))
    return Batch(inputs, targets, sizes)


def ready_batch(microbatches: Iterable[Any], target: Value, given: Sequence[Any]) -> Batch:
    """Take micro-batches that are ready. They may be ``given`` arguments instead, but not both.

    Raises:
        TypeError: they are one batch, or no iterable; or there are arguments as well.
        ValueError: there are none, or another number of targets.
    """
    if given:
        raise TypeError(
            "give arguments, which are split, or microbatches, which are ready, but not both"
        )
    inputs = list(ready(microbatches))
    if not inputs:
        raise ValueError("microbatches must have at least one entry, got none")
    targets = [None] * len(inputs) if target is None else list(ready(target, "target"))
    if len(targets) != len(inputs):
        raise ValueError(
            f"target must have one entry for each of the {len(inputs)} microbatches, has "
            f"{len(targets)}"
        )
    return Batch(inputs, targets, ())
