"""Tests arguments, their gradients through the caller's graph, and targets of steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe, Replicate
from tests.helpers.ways import (
    Way,
    assert_equal,
    batch,
    call,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    take_step,
    ways,
)
from tests.layers import Apply


def model(layers: int = 5) -> Any:
    every = [linear(3, 4), nn.Tanh(), linear(4, 4), nn.ReLU(inplace=True), linear(4, 2)]
    return nn.Sequential(*every[:layers])


mse_loss: Any = F.mse_loss  # torch does not type Tensor.backward


def in_two(module: nn.Sequential, way: Way, chunks: int = 3) -> Pipe:
    return piped(module, [2, 3], way, chunks)


# Arguments.


@each_way
def test_keyword_arguments_reach_the_first_layer(way: Way) -> None:
    first = Apply(lambda x, *, shift, factor: x * factor + shift["by"])
    module = nn.Sequential(first, linear(3, 4), linear(4, 2))
    shift = {"by": batch(7, requires_grad=True)}
    assert_equal(module, [2, 1], way, batch(7, requires_grad=True), shift=shift, factor=2)


@each_way
def test_arguments_that_are_no_tensors_reach_each_micro_batch(way: Way) -> None:
    first = Apply(lambda x, power, flag, nothing: x**power if flag and nothing is None else x)
    module = nn.Sequential(first, linear(3, 4))
    assert_equal(module, [1, 1], way, batch(7, requires_grad=True), 3, True, None)


@each_way
def test_one_tensor_may_be_two_arguments(way: Way) -> None:
    module = nn.Sequential(Apply(lambda x, y: x * y.exp()), linear(3, 4))
    plain, x = copy.deepcopy(module), batch(7, requires_grad=True)
    with piped(module, [1, 1], way) as pipe:
        take_step(pipe, way, x, x)
    (expected,) = torch.autograd.grad(mean(call(plain, x, x), None), x)
    same(x.grad, expected)


@each_way
def test_a_replicated_argument_gets_the_gradient_of_all_micro_batches(way: Way) -> None:
    layers = [Apply(lambda x, w: x @ w), linear(4, 2)]
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    own = weight.detach().clone().requires_grad_()
    module, x = nn.Sequential(*layers), batch(7)
    with piped(module, [1, 1], way) as pipe:
        take_step(pipe, way, x, Replicate(weight))
    mean(layers[1](x @ own), None).backward()
    same(weight.grad, own.grad)


# The caller's graph.


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_of_inputs_go_on_into_the_callers_graph(way: Way, chunks: int) -> None:
    before, module, x = linear(3, 3), model(), batch(7)
    plain_before, plain = copy.deepcopy(before), copy.deepcopy(module)
    with in_two(module, way, chunks) as pipe:
        take_step(pipe, way, before(x).tanh())
    mean(plain(plain_before(x).tanh()), None).backward()
    same(grads_of(before), grads_of(plain_before))
    same(grads_of(module), grads_of(plain))


@each_way
def test_the_callers_graph_gets_its_gradient_once_and_whole(way: Way) -> None:
    module, x, seen = model(), batch(7, requires_grad=True), list[Tensor]()
    hidden = x * 2
    hidden.register_hook(seen.append)
    with in_two(module, way) as pipe:
        take_step(pipe, way, hidden)
    assert x.grad is not None
    same(seen, [x.grad / 2])


@each_way
def test_hooks_of_a_leaf_input_are_called_once_and_may_change_its_gradient(way: Way) -> None:
    module, x, calls = model(), batch(7, requires_grad=True), list[str]()
    x.register_hook(lambda grad: calls.append("tensor") or grad * 2)
    x.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    own = x.detach().clone().requires_grad_()
    mean(copy.deepcopy(module)(own), None).backward()
    with in_two(module, way) as pipe:
        take_step(pipe, way, x)
    assert own.grad is not None
    same(x.grad, own.grad * 2)
    assert calls == ["tensor", "accumulated"]


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_input_of_the_callers_graph_may_be_changed_in_place(way: Way, chunks: int) -> None:
    before, x = linear(3, 4), batch(7)
    module = nn.Sequential(nn.ReLU(inplace=True), linear(4, 4), nn.Tanh(), linear(4, 2))
    plain_before, plain = copy.deepcopy(before), copy.deepcopy(module)
    with piped(module, [2, 2], way, chunks) as pipe:
        take_step(pipe, way, before(x))
    mean(plain(plain_before(x)), None).backward()
    same(grads_of(before), grads_of(plain_before))


@each_way
def test_hooks_of_a_parameter_that_the_callers_graph_uses_too_see_the_sum_once(way: Way) -> None:
    """For example, an embedding outside the pipe whose weight the last layer shares."""
    def tied() -> Any:
        torch.manual_seed(4)
        layers = [linear(3, 3) for _ in range(3)]
        layers[2].weight = layers[0].weight
        return nn.Sequential(*layers)

    x, seen = batch(7), list[Tensor]()
    for in_pipe in (True, False):
        outer, *inner = tied()
        outer.weight.register_hook(seen.append)
        outer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        if not in_pipe:
            mean(nn.Sequential(outer, *inner)(x), None).backward()
            continue
        module = nn.Sequential(*inner)
        with piped(module, [1, 1], way) as pipe:
            take_step(pipe, way, outer(x))
    assert len(seen) == 4
    same(seen[:2], seen[2:])


# Targets.


@ways
def test_a_target_may_be_a_pytree(way: Way) -> None:
    target = {"y": torch.randn(7, 2, dtype=torch.float64), "more": [torch.rand(7, 1).double(), 3]}

    def loss(y: Tensor, t: Any) -> Any:
        return ((y - t["y"]) * t["more"][0]).pow(t["more"][1] - 1).mean()

    assert_equal(model(), [2, 3], way, batch(7), target=target, loss_fn=loss)


@ways
def test_each_micro_batch_gets_a_replicated_target_whole(way: Way) -> None:
    prototypes = torch.randn(9, 2, dtype=torch.float64)

    def nearest(y: Tensor, t: Any) -> Tensor:
        return torch.cdist(y, t.value if isinstance(t, Replicate) else t).amin(1).mean()

    assert_equal(
        model(), [2, 3], way, batch(7), target=Replicate(prototypes), loss_fn=nearest
    )


@ways
def test_a_leaf_target_that_wants_a_gradient_gets_it(way: Way) -> None:
    module, x = model(), batch(7)
    target = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    own = target.detach().clone().requires_grad_()
    plain = copy.deepcopy(module)
    with in_two(module, way) as pipe:
        take_step(pipe, way, x, target=target, loss_fn=F.mse_loss)
    mse_loss(plain(x), own).backward()
    same(target.grad, own.grad)


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_of_targets_go_on_into_the_callers_graph(way: Way, chunks: int) -> None:
    teacher, module, x = linear(3, 2), model(), batch(7)
    plain_teacher, plain = copy.deepcopy(teacher), copy.deepcopy(module)
    with in_two(module, way, chunks) as pipe:
        take_step(pipe, way, x, target=teacher(x).exp(), loss_fn=F.mse_loss)
    mse_loss(plain(x), plain_teacher(x).exp()).backward()
    same(grads_of(teacher), grads_of(plain_teacher))
    same(grads_of(module), grads_of(plain))


# Refusals.


@pytest.mark.parametrize("reduction", ["max", None, "none"])
def test_another_reduction_is_refused(reduction: Any) -> None:
    with in_two(model(), Way("1f1b", "never")) as pipe:
        with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum'"):
            pipe.forward_backward(batch(7), loss_fn=mean, reduction=reduction)


@pytest.mark.parametrize("frozen", [True, False], ids=["all frozen", "loss detaches"])
def test_a_loss_that_depends_on_nothing_is_refused(frozen: bool) -> None:
    with in_two(model().requires_grad_(not frozen), Way("1f1b", "never")) as pipe:
        with pytest.raises(RuntimeError, match="the loss does not require grad"):
            pipe.forward_backward(batch(7), loss_fn=lambda y, _: y.detach().mean())


@ways
def test_the_loss_of_a_micro_batch_may_be_a_constant(way: Way) -> None:
    """For example, if none of its rows count."""

    def loss(y: Tensor, counts: Tensor) -> Any:
        return y[counts].square().sum() if counts.any() else y.new_zeros(())

    module, x = model(), batch(7, requires_grad=True)
    counts = torch.tensor([False] * 3 + [True, False, True, True])
    own, plain = x.detach().clone().requires_grad_(), copy.deepcopy(module)
    with in_two(module, way) as pipe:
        take_step(pipe, way, x, target=counts, loss_fn=loss, reduction="sum")
    loss(plain(own), counts).backward()
    same(grads_of(module), grads_of(plain))
    same(x.grad, own.grad)
