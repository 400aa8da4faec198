"""Tests selecting the tensors inside a pytree, and describing values in errors."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch

from pipert.batch.tensors import Carried, describe, differentiable, select, tensors_of

Pair = namedtuple("Pair", "left right")

PLAIN = torch.zeros(2)
LEARNED = torch.zeros(3, requires_grad=True)


def test_tensors_of_a_pytree_come_in_its_order() -> None:
    tensors, _ = tensors_of({"a": [PLAIN, 3], "b": (None, LEARNED)})
    assert [id(tensor) for tensor in tensors] == [id(PLAIN), id(LEARNED)]


@pytest.mark.parametrize("make", [tuple, list], ids=["tuple", "list"])
def test_tensor_that_occurs_twice_is_selected_once(make: Any) -> None:
    tensors, rebuild = tensors_of(make([PLAIN, LEARNED, PLAIN]))
    assert [id(tensor) for tensor in tensors] == [id(PLAIN), id(LEARNED)]
    rebuilt = rebuild((LEARNED, PLAIN))
    assert type(rebuilt) is make
    assert [id(tensor) for tensor in rebuilt] == [id(LEARNED), id(PLAIN), id(LEARNED)]


def test_tensor_that_is_a_skip_as_well_is_one_of_each() -> None:
    """Their gradients come back along different paths."""
    tensors, rebuild = tensors_of(Carried((PLAIN, PLAIN), (PLAIN, [LEARNED])))
    assert [id(tensor) for tensor in tensors] == [id(PLAIN), id(PLAIN), id(LEARNED)]
    assert rebuild((1, 2, 3)) == Carried((1, 1), (2, [3]))  # type: ignore[arg-type]


def test_differentiable_tensors_are_those_that_require_grad() -> None:
    tensors, _ = differentiable((PLAIN, LEARNED))
    assert len(tensors) == 1 and tensors[0] is LEARNED


@pytest.mark.parametrize("value", [None, 3, "text", [], {"a": ()}], ids=repr)
def test_value_without_tensors_has_none_to_select(value: Any) -> None:
    assert tensors_of(value)[0] == ()


@pytest.mark.parametrize("value", [None, 3, "text", [], {"a": ()}], ids=repr)
def test_value_without_tensors_is_rebuilt_as_it_was(value: Any) -> None:
    assert tensors_of(value)[1](()) == value


def test_rebuild_inserts_the_new_tensors() -> None:
    _, rebuild = tensors_of(Pair([PLAIN], {"k": (LEARNED, "text")}))
    assert rebuild((torch.tensor(1), torch.tensor(2))) == Pair([1], {"k": (2, "text")})


def test_rebuild_keeps_what_was_not_selected() -> None:
    _, rebuild = differentiable([PLAIN, LEARNED])
    assert rebuild((LEARNED,))[0] is PLAIN


def test_rebuild_may_be_called_again() -> None:
    _, rebuild = tensors_of([PLAIN, 0])
    rebuild((torch.tensor(1),))
    assert rebuild((torch.tensor(2),)) == [2, 0]


def test_rebuild_takes_as_many_as_were_selected() -> None:
    _, rebuild = tensors_of([PLAIN, LEARNED])
    with pytest.raises(ValueError):
        rebuild((PLAIN,))


def test_bare_tensor_is_rebuilt_as_the_other() -> None:
    _, rebuild = tensors_of(PLAIN)
    assert rebuild((LEARNED,)) is LEARNED


def test_bare_tensor_that_is_not_wanted_is_rebuilt_as_it_was() -> None:
    _, rebuild = differentiable(PLAIN)
    assert rebuild(()) is PLAIN


@pytest.mark.parametrize("nested", [False, True], ids=["bare", "nested"])
def test_rebuild_does_not_keep_what_was_selected(nested: bool) -> None:
    tensor = torch.zeros(2)
    reference = weakref.ref(tensor)
    gc.disable()
    try:
        _, rebuild = select([tensor] if nested else tensor, lambda _: True)
        del _, tensor
        assert reference() is None
    finally:
        gc.enable()
    assert rebuild((PLAIN,)) is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3), "float32[2, 3]"),
        (torch.tensor(1), "int64[]"),
        ((PLAIN, None), "(float32[2], NoneType)"),
        ([PLAIN, 3], "[float32[2], int]"),
        ({"mask": PLAIN.bool()}, "{'mask': bool[2]}"),
        ((("a",),), "((str))"),
        (object(), "object"),
    ],
)
def test_value_is_described_by_structure_shape_and_type(value: Any, text: str) -> None:
    assert describe(value) == text


def test_a_shape_comes_back_as_a_shape() -> None:
    value = {"shape": torch.ones(2, 3).shape, "x": torch.ones(1)}
    tensors, rebuild = tensors_of(value)
    assert type(rebuild(tensors)["shape"]) is torch.Size
