"""Tests the values that layers pass across a boundary, and models of all kinds, in calls and steps.

Among it are the pitfalls 18 (what crosses a border and is not differentiable, or not used),
19 (layers that work in place) and 20 (parameters in two places, and partitions without any).
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe
from tests.helpers.ways import (
    CALL,
    SCHEDULES,
    Way,
    assert_equal,
    batch,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    take_step,
)
from tests.layers import Apply, Labelled


class With(nn.Module):
    """A layer that applies a function to its input and its parameter."""

    def __init__(self, function: Callable[[Any, Tensor], Any], rows: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 3, dtype=torch.float64))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x, self.weight)


cross_entropy: Any = F.cross_entropy  # torch does not type Tensor.backward


def between(make: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> nn.Sequential:
    """Makes four layers; the functions choose the value between the second and the third."""
    return nn.Sequential(linear(3, 3), Apply(make), Apply(take), linear(3, 2))


BORDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x.sin(), x.cos()), lambda v: v[0] * v[1]),
    "dict": (lambda x: {"a": x.sin(), "b": [x.cos()]}, lambda v: v["a"] * v["b"][0]),
    "one of two unused": (lambda x: (x.sin(), x.exp()), lambda v: v[0]),
    "one detached": (lambda x: (x, x.detach()), lambda v: v[0] * v[1]),
    "one integer": (lambda x: (x, x.argmax(1)), lambda v: v[0] * v[1][:, None]),
    "None and a number": (lambda x: (x, None, 2), lambda v: v[0] * v[2]),
    "0-dimensional": (lambda x: (x, x.new_tensor(2.0)), lambda v: v[0] * v[1]),
    "one twice": (lambda x: (x, x), lambda v: v[0] * v[1].exp()),
    "view": (lambda x: x.t(), lambda v: v.t()),
    "views of one": (lambda x: x.chunk(3, 1), lambda v: torch.cat([v[0] * 2, v[2], v[1]], 1)),
    "expanded": (lambda x: x[:, :1].expand(-1, 3), lambda v: v * 2),
    "size": (lambda x: (x, x.shape), lambda v: v[0] * v[1][1]),
    "empty": (lambda x: (x, x[:0]), lambda v: v[0] + v[1].sum()),
    "all unused": (lambda x: (x,), lambda v: torch.ones_like(v[0])),
    "complex": (lambda x: torch.complex(x, x.exp()), lambda v: (v * v.conj()).real + v.imag),
    "float32": (lambda x: x.float(), lambda v: v.double()),
    "another class": (lambda x: x.as_subclass(Labelled), lambda v: v.sin()),
    "mapping": (lambda x: UserDict(a=x.sin(), b=[x.cos()]), lambda v: v["a"] * v["b"][0]),
}


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", BORDERS)
@pytest.mark.parametrize("balance", [[2, 2], [1, 1, 1, 1], [4]], ids=len)
def test_a_value_across_a_boundary_brings_its_gradient_back(
    kind: str, balance: list[int], way: Way
) -> None:
    assert_equal(between(*BORDERS[kind]), balance, way, batch(7, requires_grad=True))


class Cache:
    """An object that is no pytree, like a language model's cache of keys and values."""

    def __init__(self, keys: Tensor) -> None:
        self.layers = [{"keys": keys}]


def with_cache(make: Callable[[Tensor], Any]) -> nn.Sequential:
    return between(make, lambda v: v[0] * v[1].layers[0]["keys"].exp())


@pytest.mark.layered  # the graph is cut in there, too
@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("balance", [[2, 2], [1, 1, 1, 1]], ids=len)
def test_an_object_that_hides_a_differentiable_tensor_crosses_a_boundary_or_is_refused(
    balance: list[int], way: Way
) -> None:
    module = with_cache(lambda x: (x.sin(), Cache(x.cos())))
    if way.schedule == CALL:
        assert_equal(module, balance, way, batch(7, requires_grad=True))
        return
    with piped(module, balance, way) as pipe:
        message = r"has a Cache that holds a tensor of its graph.*register"
        with pytest.raises(TypeError, match=message):
            take_step(pipe, way, batch(7))
    assert set(grads_of(module).values()) == {None}


class Doubles:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def double(self) -> Tensor:
        return self.x * 2


BOUND: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "closure": (lambda x: lambda: x * 2, "a function"),
    "default": (lambda x: lambda a=x: a * 2, "a function"),
    "keyword": (lambda x: lambda *, a=x: a * 2, "a function"),
    "method": (lambda x: Doubles(x).double, "a method"),
    "tensor's method": (lambda x: x.exp, r"a builtin_\w+"),
}


@pytest.mark.layered  # the graph is cut in there, too
@pytest.mark.parametrize("kind", BOUND)
def test_a_function_that_has_bound_a_tensor_of_the_graph_is_refused_in_a_step(kind: str) -> None:
    bind, found = BOUND[kind]
    module = between(lambda x: (x.sin(), bind(x.cos())), lambda v: v[0] * v[1]())
    way = Way("1f1b", "never")
    with piped(module, [2, 2], way) as pipe:
        with pytest.raises(TypeError, match=f"has {found} .*put its tensors into a tuple"):
            take_step(pipe, way, batch(7))
    assert set(grads_of(module).values()) == {None}


# Layers that work in place, at the beginning of a partition.


class AddInPlace(nn.Module):
    """A layer that changes its input, and so the graph, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.bias)


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "parameter": AddInPlace,
    "mul": lambda: Apply(lambda x: x.mul_(2)),
    "some entries": lambda: Apply(lambda x: x[:, 0].mul_(2) is x or x),
    "unsqueezed": lambda: Apply(lambda x: x.unsqueeze_(1).squeeze_(1)),
}


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_partition_may_begin_in_place(kind: str, chunks: int, way: Way) -> None:
    module = nn.Sequential(linear(3, 3), IN_PLACE[kind](), linear(3, 2))
    assert_equal(module, [1, 2], way, batch(7), chunks=chunks)


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", IN_PLACE)
def test_the_first_layer_may_work_in_place_on_an_input_without_grad(kind: str, way: Way) -> None:
    module = nn.Sequential(IN_PLACE[kind](), linear(3, 3), linear(3, 2))
    assert_equal(module, [2, 1], way, batch(7))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_place_changes_that_the_plain_module_refuses_are_refused(schedule: str) -> None:
    """Tanh has saved the tensor that the next layer changes."""
    module = nn.Sequential(linear(3, 3), nn.Tanh(), nn.ReLU(inplace=True), linear(3, 2))
    with Pipe(module, [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint="never") as pipe:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipe.forward_backward(batch(7), loss_fn=mean, schedule=schedule)
    assert set(grads_of(module).values()) == {None}


# Layers that return what they got, or what they have.


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("layer", [nn.Identity, nn.Tanh])
def test_a_model_may_have_no_parameters(layer: type[nn.Module], way: Way) -> None:
    module = nn.Sequential(layer(), layer(), nn.Flatten())
    assert_equal(module, [1, 2], way, batch(7, requires_grad=True))


RETURNED: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "alone": (lambda x, w: (x, w), lambda v: v[0] * v[1]),
    "and used": (lambda x, w: (x * w, w), lambda v: v[0] * v[1]),
    "twice": (lambda x, w: (x, w, w), lambda v: v[0] * v[1] * v[2]),
    "and a view": (lambda x, w: (x, w, w.t()), lambda v: v[0] * v[1] * v[2].t()),
    "instead of the input": (lambda x, w: w.expand(len(x), 3), lambda v: v * 2),
}


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("kind", RETURNED)
def test_a_layer_may_return_its_parameter(kind: str, way: Way) -> None:
    make, take = RETURNED[kind]
    module = nn.Sequential(linear(3, 3), With(make), Apply(take), linear(3, 2))
    assert_equal(module, [2, 2], way, batch(7))


# Tensors that are trained.


# Kinds of numbers and layouts.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_gradients_have_the_dtype_of_their_parameters(
    dtype: torch.dtype, schedule: str
) -> None:
    module = nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 2, dtype=dtype))
    x, plain = torch.randn(8, 3).to(dtype), copy.deepcopy(module)

    def loss(y: Tensor, _: Any) -> Any:
        return y.abs().square().sum(1).mean()

    with Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=2) as pipe:
        found = pipe.forward_backward(x, loss_fn=loss, schedule=schedule)
    expected = loss(plain(x), None)
    expected.backward()
    assert found.dtype == expected.dtype
    same(grads_of(module), grads_of(plain), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_grad_has_the_memory_format_of_the_plain_modules(
    schedule: str, chunks: int, shared: bool
) -> None:
    first, second = (nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(2))
    if shared:
        second.weight = first.weight
    layout: Any = torch.channels_last
    module: Any = nn.Sequential(first, second)
    module.to(memory_format=layout)
    plain, x = copy.deepcopy(module), torch.randn(6, 3, 4, 4)
    plain(x).square().mean().backward()
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=chunks) as pipe:
        pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean(), schedule=schedule)
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert own.grad.stride() == other.grad.stride()


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("steps", [1, 2])
def test_a_sparse_gradient_stays_sparse(steps: int, way: Way) -> None:
    embedding = nn.Embedding(9, 3, sparse=True, dtype=torch.float64)
    module: Any = nn.Sequential(embedding, linear(3, 9))
    tokens, plain = torch.randint(0, 9, (7,)), copy.deepcopy(module)
    with piped(module, [1, 1], way) as pipe:
        for _ in range(steps):
            take_step(pipe, way, tokens, target=tokens, loss_fn=cross_entropy)
            cross_entropy(plain(tokens), tokens).backward()
    assert module[0].weight.grad.is_sparse
    same(module[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())
