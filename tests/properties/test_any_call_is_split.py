"""The promises of ``scatter`` and ``gather`` for any pytree, number of rows and of chunks.

A tree of ``Leaf`` describes a mini-batch, and tensors are made from it: so a failing example
shrinks to something readable, and each tensor has unique elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from pipert import Replicate
from pipert.batch.joining import gather
from pipert.batch.microbatch import Arguments, scatter

pytestmark = pytest.mark.slow

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.bool]


class Pair(NamedTuple):
    """A user's named tuple."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Rows:
    """A tensor to be split. ``rows`` is the number of the mini-batch unless it is given."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    rows: int | None = None

    def make(self, rows: int, number: int = 0) -> Tensor:
        shape = (rows if self.rows is None else self.rows, *self.shape)
        return (torch.arange(math.prod(shape)) + 7 * number).reshape(shape).to(self.dtype)


@dataclass(frozen=True)
class Zero:
    """A 0-dimensional tensor."""

    dtype: torch.dtype

    def make(self, rows: int, number: int) -> Tensor:
        return torch.tensor(number).to(self.dtype)


@dataclass(frozen=True)
class Whole:
    """A replicated tensor with a number of rows of its own."""

    rows: int
    beside: Any

    def make(self, rows: int, number: int) -> Replicate:
        whole = Rows(torch.float32, (2,)).make(self.rows, number)
        return Replicate({"whole": whole, "beside": self.beside})


@dataclass(frozen=True)
class Other:
    """A leaf that is no tensor."""

    value: Any

    def make(self, rows: int, number: int) -> Any:
        return self.value


Leaf = Rows | Zero | Whole | Other

shapes = st.sampled_from([(), (2,), (3, 1), (0,)])
anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "mean", b"sum"])
)
split_leaves = st.builds(Rows, st.sampled_from(DTYPES), shapes)
other_leaves = st.builds(Zero, st.sampled_from(DTYPES)) | st.builds(Other, anything)
replicated = st.builds(Whole, st.integers(0, 4), anything)


def inside(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), children, max_size=3)
        | st.builds(Pair, children, children)
    )


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, inside, max_leaves=5)


any_tree = trees(split_leaves | other_leaves | replicated)


def sizes(first: int) -> st.SearchStrategy[tuple[int, int]]:
    """Numbers of rows from ``first`` up, and of chunks: mostly fewer, sometimes more."""
    return st.integers(first, 9).flatmap(
        lambda rows: st.tuples(st.just(rows), st.integers(1, rows + 2))
    )


rows_and_chunks = sizes(0)


def of(kind: type[Leaf], tree: Any) -> list[Any]:
    """Returns the leaves of that kind."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, kind)]


def make(tree: Any, rows: int) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten([leaf.make(rows, k) for k, leaf in enumerate(leaves)], spec)


def values(tree: Any, chunks: int) -> list[Any]:
    """The micro-batches of a call with ``tree`` as its only argument."""
    return scatter((tree,), {}, chunks)


def identical(a: Any, b: Any) -> bool:
    """Two trees of one structure: tensors with the same elements, other leaves the same objects."""
    ours, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(
        x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, Tensor) else x is y
        for x, y in zip(ours, others, strict=True)
    )


# Sizes and order


@given(tree=trees(split_leaves | other_leaves), size=rows_and_chunks)
def test_every_split_tensor_has_its_rows_in_order_and_sizes_differ_by_one_at_most(
    tree: Any, size: tuple[int, int]
) -> None:
    rows, chunks = size
    batch = make(tree, rows)
    parts = [pytree.tree_leaves(part) for part in values(batch, chunks)]
    for k, (leaf, whole) in enumerate(
        zip(pytree.tree_leaves(tree), pytree.tree_leaves(batch), strict=True)
    ):
        if isinstance(leaf, Rows):
            numbers = [part[k].size(0) for part in parts]
            assert max(numbers) - min(numbers) <= 1
            assert torch.equal(torch.cat([part[k] for part in parts]), whole)


@given(tree=any_tree, size=rows_and_chunks)
def test_unsplit_arguments_go_to_each_micro_batch_unchanged(
    tree: Any, size: tuple[int, int]
) -> None:
    rows, chunks = size
    leaves, spec = pytree.tree_flatten(make(tree, rows))
    is_split = [isinstance(leaf, Rows) for leaf in pytree.tree_leaves(tree)]
    for part in values(pytree.tree_unflatten(leaves, spec), chunks):
        for leaf, split, got in zip(leaves, is_split, spec.flatten_up_to(part), strict=True):
            if not split:
                assert got is (leaf.value if isinstance(leaf, Replicate) else leaf)


@given(
    positional=st.lists(trees(split_leaves | st.builds(Other, anything)), max_size=3),
    named=st.dictionaries(st.sampled_from("xyz"), trees(split_leaves), max_size=2),
    size=rows_and_chunks,
)
def test_every_argument_arrives_in_its_place(
    positional: list[Any], named: dict[str, Any], size: tuple[int, int]
) -> None:
    rows, chunks = size
    args, kwargs = tuple(make(positional, rows)), make(named, rows)
    parts = scatter(args, kwargs, chunks)
    alone = len(args) == 1 and not kwargs
    calls = [((part,), {}) if alone else tuple(part) for part in parts]
    assert all(isinstance(part, Arguments) for part in parts) or alone
    assert identical(gather(calls), (args, kwargs))


# There and back


def joined(leaf: Any, m: int) -> Any:
    """Returns what ``gather`` should make of a leaf unchanged by ``m`` micro-batches."""

    def together(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.stack([leaf] * m) if leaf.dim() == 0 else torch.cat([leaf] * m)

    if isinstance(leaf, Replicate):
        return pytree.tree_map(together, leaf.value)
    return together(leaf) if isinstance(leaf, Tensor) and leaf.dim() == 0 else leaf


@given(tree=any_tree, size=rows_and_chunks)
def test_gather_reverses_scatter(tree: Any, size: tuple[int, int]) -> None:
    rows, chunks = size
    batch = make(tree, rows)
    parts = values(batch, chunks)
    expected = pytree.tree_map(lambda leaf: joined(leaf, len(parts)), batch)
    assert identical(gather(parts), expected)


# Gradients


@given(
    shape=shapes,
    size=sizes(1),
    dtype=st.sampled_from(FLOATS),
    used=st.sets(st.integers(0, 8), min_size=1),
)
def test_gradient_of_the_rows_is_that_of_the_micro_batches_that_were_used(
    shape: tuple[int, ...], size: tuple[int, int], dtype: torch.dtype, used: set[int]
) -> None:
    rows, chunks = size
    x = Rows(dtype, shape).make(rows).requires_grad_()
    cotangent = Rows(dtype, shape).make(rows, 1)
    pairs = zip(values(x, chunks), values(cotangent, chunks), strict=True)
    taken = [(part, grad) for i, (part, grad) in enumerate(pairs) if i in used]
    assume(taken)
    torch.autograd.backward([part for part, _ in taken], [grad for _, grad in taken])
    parts = torch.arange(rows).tensor_split(min(rows, chunks))
    is_used = torch.tensor([i in used for i, part in enumerate(parts) for _ in part])
    assert x.grad is not None
    assert torch.equal(x.grad, cotangent * is_used.reshape(rows, *(1 for _ in shape)))


@given(rows=st.integers(1, 6), chunks=st.integers(1, 8), wrapped=st.booleans())
def test_gradient_of_an_unsplit_argument_is_the_sum_over_micro_batches(
    rows: int, chunks: int, wrapped: bool
) -> None:
    scale = torch.ones(()).requires_grad_()
    parts = values((torch.ones(rows), Replicate([scale]) if wrapped else [scale]), chunks)
    uses: list[Tensor] = [part[1][0] for part in parts]
    torch.stack(uses).sum().backward()  # type: ignore[no-untyped-call]
    assert scale.grad == min(rows, chunks)
