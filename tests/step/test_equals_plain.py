"""A step is the plain module's forward and ``loss.backward()``, over everything that is chosen."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe
from tests.layers import Apply
from tests.step.compare import (
    MODES,
    SCHEDULES,
    Way,
    assert_equal,
    batch,
    grads_of,
    linear,
    mean,
    same,
    ways,
)

BALANCES = [[7], [3, 4], [2, 1, 4], [1] * 7]
CHUNKS = [1, 3, 4]
ROWS = [7, 6, 2, 1]


class Case(NamedTuple):
    balance: list[int]
    chunks: int
    rows: int


CASES = [Case(b, c, r) for b in BALANCES for c in CHUNKS for r in ROWS]
cases = pytest.mark.parametrize(
    "case", CASES, ids=[f"n={len(c.balance)}-chunks={c.chunks}-{c.rows} rows" for c in CASES]
)


def seven_layers() -> Any:
    """Each balance of ``BALANCES`` but the first starts a partition with the in-place layer."""
    norm = nn.LayerNorm(4, dtype=torch.float64)
    return nn.Sequential(
        linear(3, 4), nn.Tanh(), linear(4, 4), nn.ReLU(inplace=True), linear(4, 4), norm,
        linear(4, 2),
    )  # fmt: skip


def step(pipe: Pipe, way: Way, *args: Any, **options: Any) -> Any:
    return pipe.forward_backward(*args, schedule=way.schedule, **{"loss_fn": mean, **options})


def piped(module: nn.Sequential, balance: list[int], way: Way, chunks: int = 3) -> Pipe:
    devices = ["cpu"] * len(balance)
    return Pipe(module, balance, devices=devices, chunks=chunks, checkpoint=way.checkpoint)


# Partitions x micro-batches x rows.


@pytest.mark.pairwise
@ways
@cases
def test_loss_and_gradients_are_the_plain_modules(case: Case, way: Way) -> None:
    x = batch(case.rows, requires_grad=True)
    assert_equal(seven_layers(), case.balance, way, x, chunks=case.chunks)


@ways
@pytest.mark.parametrize("balance", BALANCES, ids=len)
def test_outputs_are_the_plain_modules(balance: list[int], way: Way) -> None:
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)
    with piped(module, balance, way) as pipe:
        _, outputs = step(pipe, way, x, return_outputs=True)
    same(outputs, plain(x).detach())


@ways
def test_what_is_returned_has_no_graph(way: Way) -> None:
    with piped(seven_layers(), [3, 4], way) as pipe:
        loss, outputs = step(pipe, way, batch(7), return_outputs=True)
    assert not loss.requires_grad
    assert not outputs.requires_grad


@ways
@pytest.mark.parametrize("chunks", CHUNKS)
def test_gradients_accumulate(way: Way, chunks: int) -> None:
    x = batch(7, requires_grad=True)
    assert_equal(seven_layers(), [2, 1, 4], way, x, chunks=chunks, steps=3)


@ways
def test_gradients_are_added_to_those_of_a_plain_backward(way: Way) -> None:
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)
    with piped(module, [3, 4], way) as pipe:
        mean(pipe(x), None).backward()
        step(pipe, way, x)
        mean(pipe(x), None).backward()
    for _ in range(3):
        mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


@ways
def test_grad_is_added_to_in_place(way: Way) -> None:
    module = seven_layers()
    with piped(module, [3, 4], way) as pipe:
        step(pipe, way, batch(7))
        before = [p.grad for p in module.parameters()]
        step(pipe, way, batch(7))
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))


@ways
def test_steps_may_have_any_rows_one_after_the_other(way: Way) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    with piped(module, [3, 4], way) as pipe:
        for rows in (7, 1, 12, 2):
            x = batch(rows)
            step(pipe, way, x)
            mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


@ways
def test_no_two_gradients_share_memory(way: Way) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.a + self.b)

    layer = Sum()
    for chunks in (1, 3):
        layer.zero_grad()
        with piped(nn.Sequential(layer, nn.Tanh()), [1, 1], way, chunks) as pipe:
            step(pipe, way, batch(6))
        assert layer.a.grad is not None and layer.b.grad is not None
        assert layer.a.grad.data_ptr() != layer.b.grad.data_ptr()


@ways
def test_parameters_are_updated_as_in_the_plain_loop(way: Way) -> None:
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)
    with piped(module, [3, 4], way) as pipe:
        for _ in range(3):
            step(pipe, way, x)
            mean(plain(x), None).backward()
            for parameter in (*module.parameters(), *plain.parameters()):
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
    same(dict(module.state_dict()), dict(plain.state_dict()))


# What is frozen.

FROZEN: dict[str, list[int]] = {
    "nothing": [],
    "first layer": [0],
    "middle layer": [2],
    "last layer": [6],
    "first partition": [0, 2],
    "last partition": [4, 5, 6],
    "all but the first layer": [2, 4, 5, 6],
    "all but the last layer": [0, 2, 4, 5],
}


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
def test_what_is_frozen_has_no_grad_and_the_rest_the_plain_modules(
    frozen: str, requires_grad: bool, way: Way
) -> None:
    module = seven_layers()
    for index in FROZEN[frozen]:
        module[index].requires_grad_(False)
    assert_equal(module, [3, 4], way, batch(7, requires_grad))


@ways
def test_a_frozen_model_gives_its_input_a_gradient(way: Way) -> None:
    module = seven_layers().requires_grad_(False)
    assert_equal(module, [2, 1, 4], way, batch(7, requires_grad=True))


@ways
def test_one_parameter_of_a_layer_may_be_frozen(way: Way) -> None:
    module = seven_layers()
    module[2].bias.requires_grad_(False)
    assert_equal(module, [3, 4], way, batch(7))


@ways
def test_a_parameter_that_no_layer_uses_has_no_grad(way: Way) -> None:
    module = seven_layers()
    module[2].register_parameter("unused", nn.Parameter(torch.zeros(3)))
    assert_equal(module, [3, 4], way, batch(7))
    assert module[2].unused.grad is None


@ways
def test_a_parameter_that_the_loss_does_not_depend_on_has_no_grad(way: Way) -> None:
    """Its partition goes backward, its layer does not."""
    module: Any = nn.Sequential(
        linear(3, 3), Apply(lambda x: (x, x)), Both(linear(3, 2), linear(3, 4)), nn.Identity()
    )
    assert_equal(module, [2, 2], way, batch(7), loss_fn=lambda y, _: mean(y[0], None))
    assert module[2].second.weight.grad is None


class Both(nn.Module):
    """A layer for each of two values."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.first(value[0]), self.second(value[1])


@ways
def test_a_graph_that_is_cut_leaves_what_is_before_without_grad(way: Way) -> None:
    module = nn.Sequential(linear(3, 4), nn.Tanh(), Apply(torch.detach), linear(4, 2))
    assert_equal(module, [2, 2], way, batch(7, requires_grad=True))
    assert module[0].weight.grad is None


# Reductions.


@ways
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_reduction_sum_adds_the_losses_of_the_micro_batches(way: Way, rows: int) -> None:
    module, x = seven_layers(), batch(rows, requires_grad=True)
    plain, own = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with piped(module, [3, 4], way) as pipe:
        loss = step(pipe, way, x, loss_fn=lambda y, _: y.square().sum(), reduction="sum")
    expected = plain(own).square().sum()
    expected.backward()
    same(loss, expected.detach())
    same(grads_of(module), grads_of(plain))
    same(x.grad, own.grad)


@ways
def test_reduction_mean_weighs_by_rows_where_micro_batches_differ(way: Way) -> None:
    """7 rows in 3 micro-batches: 3, 2 and 2. The mean of the means would be another number."""
    rows = torch.arange(7, dtype=torch.float64).view(7, 1)
    module = nn.Sequential(nn.Identity(), linear(1, 1))
    with piped(module, [1, 1], way) as pipe:
        loss = step(pipe, way, rows, loss_fn=lambda y, t: (y * 0 + t).mean(), target=rows)
    same(loss.item(), 3.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_rows_to_count_there_is_one_micro_batch(reduction: str) -> None:
    module = nn.Sequential(Apply(lambda x: x.expand(1, 3)), linear(3, 1))
    plain = copy.deepcopy(module)
    x = torch.tensor(2.0, dtype=torch.float64)
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        loss = pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), reduction=reduction)
    same(loss, plain(x).sum().detach())


# Losses.


class Scaled(nn.Module):
    """A loss that learns something itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * self.scale - target).square().mean()


def weighted(weight: float, output: Tensor, target: Tensor) -> Tensor:
    return weight * (output - target).abs().mean()


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "functional": F.mse_loss,
    "partial of functional": functools.partial(F.smooth_l1_loss, beta=0.1),
    "module": nn.MSELoss(),
    "partial": functools.partial(weighted, 3.0),
    "lambda": lambda y, t: (y * t).mean(),
    "of shape (1,)": lambda y, t: (y * t).mean().view(1),
    "of shape (1, 1)": lambda y, t: (y * t).mean().view(1, 1),
}


@ways
@pytest.mark.parametrize("kind", LOSSES)
def test_any_function_of_output_and_target_may_be_the_loss(kind: str, way: Way) -> None:
    module, x = seven_layers(), batch(7)
    target = torch.randn(7, 2, dtype=torch.float64)
    assert_equal(module, [3, 4], way, x, target=target, loss_fn=LOSSES[kind])


@ways
def test_a_loss_with_parameters_gets_their_gradients(way: Way) -> None:
    module, loss, x = seven_layers(), Scaled(), batch(7)
    target = torch.randn(7, 2, dtype=torch.float64)
    plain, plain_loss = copy.deepcopy(module), copy.deepcopy(loss)
    with piped(module, [3, 4], way) as pipe:
        for _ in range(2):
            step(pipe, way, x, target=target, loss_fn=loss)
            plain_loss(plain(x), target).backward()
    same(grads_of(loss), grads_of(plain_loss))
    same(grads_of(module), grads_of(plain))


@ways
def test_a_frozen_model_may_have_a_loss_that_learns(way: Way) -> None:
    module, loss, x = seven_layers().requires_grad_(False), Scaled(), batch(7)
    target = torch.randn(7, 2, dtype=torch.float64)
    plain_loss = copy.deepcopy(loss)
    with piped(module, [3, 4], way) as pipe:
        step(pipe, way, x, target=target, loss_fn=loss)
    plain_loss(module(x), target).backward()
    same(grads_of(loss), grads_of(plain_loss))
    assert set(grads_of(module).values()) == {None}


@ways
def test_a_loss_may_use_parameters_of_the_model(way: Way) -> None:
    """As weight decay does: some of the gradient comes from another partition than the rest."""
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)

    def decayed(of: Any) -> Callable[[Tensor, Any], Any]:
        return lambda y, _: mean(y, None) + of[0].weight.square().sum()

    with piped(module, [3, 4], way) as pipe:
        step(pipe, way, x, loss_fn=decayed(module))
    decayed(plain)(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_may_change_the_output_in_place(schedule: str) -> None:
    def in_place(output: Tensor, target: Any) -> Any:
        return mean(output.add_(1), None)

    assert_equal(seven_layers(), [3, 4], Way(schedule, "never"), batch(7), loss_fn=in_place)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_modes_give_the_same_bits(schedule: str, mode: str) -> None:
    """And so do two runs."""

    def gradients(checkpoint: str) -> Any:
        torch.manual_seed(1)
        module, way = seven_layers(), Way(schedule, checkpoint)
        with piped(module, [2, 1, 4], way, 4) as pipe:
            loss = step(pipe, way, batch(9))
        return loss, grads_of(module)

    same(gradients(mode), gradients("never"), rtol=0, atol=0)
