"""Tests values that share memory at a boundary, one of which a layer changes in place.

One tensor twice stays one tensor. Of two that overlap, such as a base and its view, a change of one
in place would have to be one of the other, in another task's graph: it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import pop, skippable, stash
from tests.helpers.ways import (
    Way,
    assert_equal,
    batch,
    each_way,
    grads_of,
    linear,
    piped,
    same,
    take_step,
)
from tests.layers import Apply


def between(make: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> nn.Sequential:
    """Makes five layers; the functions produce the inputs of the third and the fourth."""
    return nn.Sequential(linear(3, 3), Apply(make), nn.Identity(), Apply(take), linear(3, 2))


ONE_TWICE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "first changed": (lambda x: (x, x), lambda v: v[0].mul_(2) + v[1].exp()),
    "second changed": (lambda x: {"a": x, "b": [x]}, lambda v: v["b"][0].sin_() * v["a"]),
    "beside another": (lambda x: (x, x * 3, x), lambda v: v[2].mul_(v[1]) + v[0]),
    "a view of it changed": (lambda x: (x, x), lambda v: v[0][:, :1].mul_(2).exp() + v[1]),
    "not changed": (lambda x: (x, x), lambda v: v[0] * v[1].exp()),
}


@pytest.mark.layered  # a change in place is refused where it is recomputed
@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", ONE_TWICE)
@pytest.mark.parametrize("balance", [[2, 3], [1, 1, 1, 1, 1], [2, 1, 2]], ids=str)
def test_a_tensor_that_occurs_twice_stays_one_tensor(
    kind: str, balance: list[int], way: Way
) -> None:
    assert_equal(between(*ONE_TWICE[kind]), balance, way, batch(7, requires_grad=True))


OVERLAPPING: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "base and view": (lambda x: (x, x[:, :2]), lambda v: v[0].mul_(2) + v[1].sum(1, True)),
    "view changed": (lambda x: (x, x[:, :2]), lambda v: v[1].mul_(2).sum(1, True) + v[0]),
    "two views": (lambda x: (x[:, :2], x), lambda v: v[0][:, :1].exp_() + v[1]),
    "detached": (lambda x: (x, x.detach()), lambda v: v[0].mul_(2) * v[1]),
}  # fmt: skip


@pytest.mark.layered  # a change in place is refused where it is recomputed
@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_change_of_one_of_two_that_overlap_is_refused(kind: str, way: Way) -> None:
    module = between(*OVERLAPPING[kind])
    with piped(module, [2, 3], way) as pipe:
        with pytest.raises(RuntimeError, match="share memory.*changed in place.*a clone of one"):
            take_step(pipe, way, batch(7))
    assert set(grads_of(module).values()) == {None}


@pytest.mark.layered  # a change in place is refused where it is recomputed
@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_change_of_one_of_two_arguments_that_overlap_is_refused(chunks: int, way: Way) -> None:
    first = Apply(lambda x, y: x.mul_(2)[:, :2] + y)
    module, x = nn.Sequential(first, linear(2, 4)), batch(7, requires_grad=True)
    hidden = x * 1
    with piped(module, [1, 1], way, chunks) as pipe:
        with pytest.raises(RuntimeError, match="share memory"):
            take_step(pipe, way, hidden, hidden[:, :2])


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("balance", [[2, 3], [1, 1, 1, 1, 1]], ids=str)
def test_parts_of_one_tensor_that_do_not_overlap_may_be_changed(
    balance: list[int], way: Way
) -> None:
    module = between(
        lambda x: (x[:, :1], x[:, 1:]), lambda v: torch.cat([v[0].mul_(2), v[1].exp()], 1)
    )
    assert_equal(module, balance, way, batch(7))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [kind for kind in OVERLAPPING if kind != "detached"])
def test_overlapping_values_without_gradients_change_as_in_the_plain_module(
    kind: str, guard: Any
) -> None:
    module = between(*OVERLAPPING[kind])
    with guard(), Pipe(copy.deepcopy(module), [2, 3], devices=["cpu"] * 2, chunks=3) as pipe:
        x = batch(7)
        same(pipe(x), module(x))


@pytest.mark.cuda
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_change_behind_a_copy_is_refused(kind: str, guard: Any) -> None:
    module, devices = between(*OVERLAPPING[kind]), ["cpu", "cuda:0"]
    with guard(), Pipe(module, [2, 3], devices=devices, chunks=3) as pipe:
        with pytest.raises(RuntimeError, match="share memory"):
            pipe(batch(7))


@each_way
def test_a_skip_may_be_one_tensor_twice(way: Way) -> None:
    @skippable(stash=["pair"])
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x * 2
            yield stash("pair", (y, y))
            return x.sin()

    @skippable(pop=["pair"])
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            first, second = yield pop("pair")
            return x + first.mul_(3) * second

    layers = [linear(3, 3), Stash(), nn.Tanh(), Pop(), linear(3, 2)]
    assert_equal(nn.Sequential(*layers), [2, 1, 2], way, batch(7))
