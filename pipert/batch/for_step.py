"""Splits the arguments and the target of a step, or takes micro-batches that are ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pipert._typing import Value
from pipert.batch.microbatch import TARGET, arguments_of, as_value, ready, scatter_with_sizes

__all__: list[str] = []


class Batch(NamedTuple):
    """The micro-batches of a step."""

    inputs: list[Any]
    targets: Sequence[Value]
    sizes: Sequence[int]
    """The numbers of rows; empty if the micro-batches came ready, and may have none."""


def batch_of_step(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Value, chunks: int,
    microbatches: Iterable[Any] | None, as_arguments: bool,
) -> Batch:  # fmt: skip
    """Split the arguments of a step, unless there are ``microbatches``, which are ready.

    With ``as_arguments`` each of these becomes the arguments of a call, see :func:`arguments_of`.

    Raises:
        ValueError: arguments and target disagree on the number of rows; or there are no
            micro-batches, or another number of targets.
        TypeError: an argument hides rows that cannot be split; or micro-batches are one batch, or
            no iterable, or there are arguments as well.
    """
    if microbatches is not None:
        if args or kwargs:
            raise TypeError(
                "give arguments, which are split, or microbatches, which are ready, but not both"
            )
        return _ready_batch(microbatches, target, as_arguments)
    split, sizes = scatter_with_sizes(args, {**kwargs, TARGET: target}, chunks)
    inputs, targets = [], []
    for micro_batch in split:
        keywords = dict(micro_batch.kwargs)
        targets.append(keywords.pop(TARGET))
        inputs.append(as_value(micro_batch.args, keywords))
    return Batch(inputs, targets, sizes)


def _ready_batch(microbatches: Iterable[Any], target: Value, as_arguments: bool) -> Batch:
    inputs = list(ready(microbatches))
    if not inputs:
        raise ValueError("microbatches must have at least one entry, got none")
    targets = [None] * len(inputs) if target is None else list(ready(target, "target"))
    if len(targets) != len(inputs):
        raise ValueError(
            f"target must have one entry for each of the {len(inputs)} microbatches, has "
            f"{len(targets)}"
        )
    if as_arguments:
        inputs = [as_value(*arguments_of(each)) for each in inputs]
    return Batch(inputs, targets, ())
