"""Splits a mini-batch into micro-batches, and joins their outputs.

A mini-batch is any pytree. Its *leaves* are treated by kind:

* a tensor with at least one dimension is split along dimension 0;
* a 0-dimensional tensor, a number, a string, ``None`` and the like go to each micro-batch as is;
* ``Replicate(x)`` sends any ``x`` whole to each micro-batch;
* an object that hides rows, such as a NumPy array or a dataclass that is not registered as a
  pytree but holds tensors, is refused: each micro-batch would silently get the rows of all.

There are ``min(chunks, batch size)`` micro-batches, whose sizes differ by at most one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipert._typing import Value
from pipert.batch.tensors import describe

__all__ = ["Replicate"]


class Arguments(NamedTuple):
    """The arguments of the first layer, unless there is just one positional argument.

    >>> sample = Arguments((x, mask), {"scale": s})  # doctest: +SKIP
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # never changed


class Replicate:
    """Marks an argument that goes whole to each micro-batch instead of being split.

    Args:
        value: a tensor, or any pytree.

    >>> pipe(x, Replicate(attention_bias))  # doctest: +SKIP
    """

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicate({self.value!r})"


class _Scatter(torch.autograd.Function):
    """Slices of one tensor whose gradients are concatenated once.

    Not ``Tensor.split``, which forbids in-place operations on its results, and not slicing,
    whose backward makes a tensor of the whole batch for each micro-batch.
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


def scatter(args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int) -> list[Value]:
    """Split a call's arguments into at most ``chunks`` micro-batches.

    Each is the value of the first layer's only positional argument, or :class:`Arguments`.
    """
    return scatter_with_sizes(args, kwargs, chunks)[0]


def scatter_with_sizes(
    args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int
) -> tuple[list[Value], list[int]]:
    """Like :func:`scatter`, also returning each micro-batch's rows: 1 where there is no tensor."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    batch: int | None = None

    def path(k: int) -> str:
        keys = _keys((args, kwargs), k)
        if keys is None:
            return f"leaf {k} of the arguments"
        root = "args" if pytree.keystr(keys[:1]) == "[0]" else "kwargs"
        return root + pytree.keystr(keys[1:])

    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            _refuse_hidden_rows(path, k, leaf)
        elif leaf.dim() > 0:
            if batch is None:
                batch, first = leaf.size(0), k
            elif leaf.size(0) != batch:
                raise ValueError(
                    "all tensors of a mini-batch must have the same number of rows (dimension 0), "
                    f"but {path(first)} has {batch} and {path(k)} has "
                    f"{leaf.size(0)}; wrap what belongs whole to each micro-batch in Replicate(...)"
                )
    m = max(1, min(chunks, 1 if batch is None else batch))
    if m == 1:
        whole = [leaf.value if isinstance(leaf, Replicate) else leaf for leaf in leaves]
        return [as_value(*pytree.tree_unflatten(whole, spec))], [1 if batch is None else batch]
    assert batch is not None
    sizes = [batch // m + (i < batch % m) for i in range(m)]
    columns = [_split(leaf, sizes) for leaf in leaves]
    if len(args) == 1 and not kwargs and args[0] is leaves[0]:
        return columns[0], sizes
    rows = zip(*columns, strict=True)
    return [as_value(*pytree.tree_unflatten(list(row), spec)) for row in rows], sizes


def as_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Returns the first layer's input: its only positional argument, or :class:`Arguments`."""
    return args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)


def gather(outputs: list[Value]) -> Value:
    """Joins the outputs of the micro-batches, whose structure must be the same.

    Tensors are concatenated along dimension 0, 0-dimensional ones stacked to shape ``(m,)``; other
    leaves must be equal and are returned once.
    """
    first = outputs[0]
    if isinstance(first, Tensor) and all(isinstance(output, Tensor) for output in outputs):
        return _join(outputs, outputs, 0)
    leaves, spec = pytree.tree_flatten(first)
    columns = [[leaf] for leaf in leaves]
    for i, output in enumerate(outputs[1:], start=1):
        others, other = pytree.tree_flatten(output)
        if other != spec:
            raise ValueError(
                "the last layer must return the same structure for each micro-batch, but returned "
                f"{spec} for micro-batch 0 and {other} for micro-batch {i}"
            )
        for column, leaf in zip(columns, others, strict=True):
            column.append(leaf)
    joined = [_join(column, outputs, k) for k, column in enumerate(columns)]
    return pytree.tree_unflatten(joined, spec)


def _split(leaf: Any, sizes: list[int]) -> list[Any]:
    if isinstance(leaf, Replicate):
        return [leaf.value] * len(sizes)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return [leaf] * len(sizes)
    if leaf.requires_grad and torch.is_grad_enabled():
        return list(_Scatter.apply(leaf, sizes))  # type: ignore[no-untyped-call]
    return _own_versions(torch.split(leaf, sizes))


def _own_versions(parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Gives all parts but the last a version counter of their own.

    With a shared counter, a first layer that works in place on one micro-batch would invalidate
    what autograd saved of the others. The last part, which may not be checkpointed, keeps the
    tensor's counter. So autograd still notices when the tensor changes between forward and
    backward, and when the first layer changes what other code has saved.
    """
    return [*[part.data for part in parts[:-1]], parts[-1].detach()]


def _join(column: list[Any], outputs: list[Value], k: int) -> Any:
    first = column[0]
    if all(isinstance(leaf, Tensor) for leaf in column):
        kinds = {(leaf.dim() > 0, leaf.shape[1:], leaf.dtype, leaf.device) for leaf in column}
        if len(kinds) > 1:
            raise ValueError(
                f"{_path(outputs[0], k)} must have one shape beyond its rows, one dtype and one "
                "device in all micro-batches, got "
                + ", ".join(sorted({f"{describe(leaf)} on {leaf.device}" for leaf in column}))
                + "; return rows of equal shape, or a 0-dimensional tensor"
            )
        if first.dim() == 0:
            return torch.stack(column)
        return torch.cat(column) if len(column) > 1 else first
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


def _refuse_hidden_rows(path: Callable[[int], str], k: int, leaf: Any) -> None:
    fields = vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, type) else {}
    hides = any(isinstance(field, Tensor) for field in fields.values())
    if isinstance(leaf, Replicate) or isinstance(leaf, torch.nn.Module):
        return
    if dataclasses.is_dataclass(leaf) and hides:
        remedy = "register its class with torch.export.register_dataclass to split its tensors"
    elif hides:
        remedy = "pass its tensors as arguments, or register its class as a pytree"
    elif getattr(leaf, "ndim", 0):
        remedy = "convert it with torch.as_tensor to split its rows"
    else:
        return
    raise TypeError(
        f"{path(k)} is a {type(leaf).__qualname__}, which pipert cannot split: each "
        f"micro-batch would get the rows of all. Either {remedy}, or wrap it in Replicate(...)"
    )


def _path(output: Value, k: int) -> str:
    """Returns the ``k``-th leaf of ``output`` as a user writes it: ``output[0]['mask']``."""
    keys = _keys(output, k)
    return f"leaf {k} of the output" if keys is None else "output" + pytree.keystr(keys)


def _keys(value: Value, k: int) -> tuple[Any, ...] | None:
    """Returns the path to the ``k``-th leaf; ``None`` below a type registered without names."""
    try:
        return tuple(pytree.tree_flatten_with_path(value)[0][k][0])
    except ValueError:
        return None
