"""Splits a mini-batch into micro-batches.

A mini-batch is any pytree, in which any mapping is a node (``trees``). Its *leaves* are treated by
kind:

* a tensor with at least one dimension is split along dimension 0; one that occurs twice, once;
* a 0-dimensional tensor, a number, a string, ``None`` and the like go to each micro-batch as is;
* ``Replicate(x)`` sends any ``x`` whole to each micro-batch;
* an object that has rows, such as a NumPy array, or one that holds tensors but is not registered
  as a pytree, is refused: each micro-batch would silently get the rows of all micro-batches.

There are ``min(chunks, batch size)`` micro-batches, whose sizes differ by at most one. With one
chunk, and of micro-batches that are :func:`ready`, nothing is split, so rows do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipert._typing import Value
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

__all__ = ["Replicate"]


TARGET = "target of forward_backward"
"""The keyword under which a step's target is split with the arguments; no layer could have it."""


class Arguments(NamedTuple):
    """The first layer's arguments, if they are not a single positional one.

    >>> example = Arguments((x, mask), {"scale": s})  # doctest: +SKIP
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # never changed


@dataclass(frozen=True, slots=True, eq=False)
class Replicate:
    """An argument that goes whole to each micro-batch instead of being split.

    Args:
        value: a tensor, or any pytree.

    >>> pipe(x, Replicate(attention_bias))  # doctest: +SKIP
    """

    value: Value


class _Scatter(torch.autograd.Function):
    """Splits a tensor; its backward concatenates the gradients of the slices once.

    ``Tensor.split`` would forbid in-place operations on its results, and the backward of slicing
    would make a tensor of the whole batch for each micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sizes = sizes
        ctx.like = x.new_empty((0, *x.shape[1:]))
        return tuple(_own_versions(torch.split(x, sizes)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        if all(grad is None for grad in grads):
            return None, None
        parts = [
            ctx.like.new_zeros((size, *ctx.like.shape[1:])) if grad is None else grad
            for grad, size in zip(grads, ctx.sizes, strict=True)
        ]
        return torch.cat(parts), None


def arguments_of(microbatch: Any) -> Arguments:
    """Return the arguments that a micro-batch stands for.

    A mapping holds keyword arguments, a tuple positional ones; anything else is the only argument.
    """
    if isinstance(microbatch, Arguments):
        return microbatch
    if isinstance(microbatch, Mapping):
        return Arguments((), dict(microbatch))
    return Arguments(microbatch if isinstance(microbatch, tuple) else (microbatch,))


def explain_mapping(error: BaseException, value: Value, function: Callable[..., Any]) -> None:
    """Add how to pass a dict's entries, if all its keys name parameters of ``function``."""
    if isinstance(value, Mapping) and value and callable(function):
        parameters = signature(getattr(function, "forward", function)).parameters
        if value.keys() <= parameters.keys():
            error.add_note("the model got a dict as its one argument; to pass the entries: **batch")


def ready(microbatches: Iterable[Any], what: str = "microbatches") -> Iterator[Any]:
    """Yield the caller's micro-batches, or their targets, with their containers rebuilt.

    Raises:
        TypeError: they are one batch, or no iterable.
    """
    if isinstance(microbatches, Tensor | Mapping | str) or not isinstance(microbatches, Iterable):
        raise TypeError(
            f"{what} must be an iterable with one entry for each micro-batch, such as a list of "
            f"dicts, got {type(microbatches).__qualname__}"
        )
    return map(_in_own_containers, microbatches)


def _in_own_containers(microbatch: Any) -> Any:
    leaves, spec = flatten(microbatch, is_whole)
    return unflatten(spec, _unwrapped(leaves))


def scatter(args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int) -> list[Value]:
    """Split a call's arguments into at most ``chunks`` micro-batches.

    Each is the first layer's only positional argument, or :class:`Arguments`.
    """
    return scatter_with_sizes(args, kwargs, chunks)[0]


def scatter_with_sizes(
    args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int
) -> tuple[list[Value], list[int]]:
    """Like :func:`scatter`; also return each micro-batch's number of rows: 1 if it is unknown."""
    leaves, spec = flatten((args, kwargs), is_whole_in_rows if chunks > 1 else is_whole)
    batch: int | None = None
    for name in ("input_ids", "labels", TARGET):
        if isinstance(kwargs.get(name), list):
            _refuse_lists_of_numbers(name, kwargs[name])

    def path(k: int) -> str:
        found = [*paths_of(spec)][k]
        root = "args" if found.startswith("[0]") else "kwargs"
        return (root + found[3:]).replace(f"kwargs[{TARGET!r}]", "target", 1)

    for k, leaf in enumerate(leaves if chunks > 1 else ()):
        if not isinstance(leaf, Tensor):
            _refuse_hidden_rows(path, k, leaf)
        elif leaf.dim() > 0:
            if batch is None:
                batch, first = leaf.size(0), k
            elif leaf.size(0) != batch:
                raise ValueError(
                    "all tensors of a mini-batch must have the same number of rows (dimension 0), "
                    f"but {path(first)} has {batch} and {path(k)} has "
                    f"{leaf.size(0)}; wrap what belongs whole to each micro-batch in "
                    "Replicate(...). If the entries of a list are the rows, pass a step or map "
                    "ready micro-batches"
                )
    m = max(1, min(chunks, 1 if batch is None else batch))
    if m == 1:
        if any([isinstance(leaf, Replicate) for leaf in leaves]):
            args, kwargs = unflatten(spec, _unwrapped(leaves))
        return [as_value(args, kwargs)], [1 if batch is None else batch]  # in the caller's lists
    assert batch is not None
    sizes = [batch // m + (i < batch % m) for i in range(m)]
    parts: dict[int, list[Any]] = {}
    for k, leaf in enumerate(leaves):
        is_split = isinstance(leaf, Tensor) and leaf.dim() > 0
        if is_split and (leaf.is_nested or leaf.layout != torch.strided):
            raise TypeError(
                f"{path(k)} is a sparse or nested tensor, whose rows cannot be split; make it "
                "dense, wrap it in Replicate(...), or use chunks=1"
            )
        if id(leaf) not in parts:
            parts[id(leaf)] = _split(leaf, sizes)
    columns = [parts[id(leaf)] for leaf in leaves]
    if len(args) == 1 and not kwargs and args[0] is leaves[0]:
        return columns[0], sizes
    rows = zip(*columns, strict=True)
    return [as_value(*unflatten(spec, iter(row))) for row in rows], sizes


def as_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Return the first layer's input: its only positional argument, or :class:`Arguments`."""
    return args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)


def _unwrapped(leaves: list[Any]) -> Iterator[Any]:
    return iter([leaf.value if isinstance(leaf, Replicate) else leaf for leaf in leaves])


def _split(leaf: Any, sizes: list[int]) -> list[Any]:
    if isinstance(leaf, Replicate):
        return [leaf.value] * len(sizes)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return [leaf] * len(sizes)
    if leaf.requires_grad and torch.is_grad_enabled():
        return list(_Scatter.apply(leaf, sizes))  # type: ignore[no-untyped-call]
    return _own_versions(torch.split(leaf, sizes))


def _own_versions(parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Give each part but the last a version counter of its own.

    With a shared counter, a first layer that works in place on one micro-batch would invalidate
    what autograd saved of the others. The last part, which may not be checkpointed, keeps the
    tensor's counter, so autograd still notices when the tensor changes between forward and
    backward, and when the first layer changes what other code has saved.
    """
    return [*[part.data for part in parts[:-1]], parts[-1].detach()]


def _refuse_lists_of_numbers(name: str, value: Any) -> None:
    """Refuse numbers in lists, as a tokenizer returns them: rows are those of tensors."""
    inner = value
    while isinstance(inner, list) and inner:
        inner = inner[0]
    if inner is not value and isinstance(inner, Real):
        name = name.partition(" of ")[0]
        raise TypeError(f"{name} must be a tensor, got a list of numbers; write torch.tensor(...)")


def _refuse_hidden_rows(path: Callable[[int], str], k: int, leaf: Any) -> None:
    if isinstance(leaf, Replicate):
        return
    is_array = has_rows(leaf)
    if is_array or any(map(has_rows, held_by(leaf))):
        remedy = "convert it with torch.as_tensor" if is_array else REMEDY
        raise TypeError(
            f"{path(k)} is a {type(leaf).__qualname__}, which pipert cannot split: each "
            f"micro-batch would get the rows of all. To split its rows, {remedy}; or wrap it in "
            "Replicate(...)"
        )


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
