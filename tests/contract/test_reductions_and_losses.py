"""Tests losses of steps: any function, their reductions, and the denominator of sums."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe
from tests.helpers.pipes import pipe_of
from tests.helpers.ways import (
    MODES,
    Way,
    assert_equal,
    batch,
    grads_of,
    linear,
    mean,
    piped,
    same,
    seven_layers,
    take_step,
    ways,
)

# Reductions.


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_reduction_sum_adds_the_losses_of_the_micro_batches(way: Way, rows: int) -> None:
    module, x = seven_layers(), batch(rows, requires_grad=True)
    plain, own = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with piped(module, [3, 4], way) as pipe:
        loss = take_step(pipe, way, x, loss_fn=lambda y, _: y.square().sum(), reduction="sum")
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
        loss = take_step(pipe, way, rows, loss_fn=lambda y, t: (y * 0 + t).mean(), target=rows)
    same(loss.item(), 3.0)


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


@pytest.mark.pairwise
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
            take_step(pipe, way, x, target=target, loss_fn=loss)
            plain_loss(plain(x), target).backward()
    same(grads_of(loss), grads_of(plain_loss))
    same(grads_of(module), grads_of(plain))


@ways
def test_a_loss_may_use_parameters_of_the_model(way: Way) -> None:
    """As weight decay does. Then a gradient comes from two partitions."""
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)

    def decayed(of: Any) -> Callable[[Tensor, Any], Any]:
        return lambda y, _: mean(y, None) + of[0].weight.square().sum()

    with piped(module, [3, 4], way) as pipe:
        take_step(pipe, way, x, loss_fn=decayed(module))
    decayed(plain)(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


# The denominator ---------------------------------------------------------------------------------

ROWS, CLASSES, CHUNKS = 11, 5, 4
IGNORED = -100
NAN = float("nan")

schedules = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved"])
modes = pytest.mark.parametrize("checkpoint", MODES)


def total(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")


def number_of(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def a_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 8), nn.Tanh(), linear(8, CLASSES))


def padded(*ignored: int) -> tuple[Tensor, Tensor]:
    """Makes rows, some with an ignored target; micro-batch 0 has the first three rows."""
    torch.manual_seed(2)
    x = torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)
    target = torch.randint(CLASSES, (ROWS,))
    target[list(ignored)] = IGNORED
    return x, target


def plain_step(model: nn.Module, x: Tensor, target: Tensor, scale: float = 1.0) -> list[Any]:
    own, x = copy.deepcopy(model), x.detach().requires_grad_()
    loss = F.cross_entropy(own(x), target, ignore_index=IGNORED)
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), grads_of(own), x.grad]


def stepped(model: nn.Sequential, x: Tensor, target: Tensor, **options: Any) -> list[Any]:
    checkpoint = options.pop("checkpoint", None)
    options = {"loss_fn": total, "denominator": number_of(target), **options}
    x = x.detach().requires_grad_()
    balance = [2, 1, 1, 1] if options.get("schedule") == "interleaved" else [2, 2, 1]
    with pipe_of(model, balance, chunks=CHUNKS, checkpoint=checkpoint) as pipe:
        loss = pipe.forward_backward(x, target=target, **options)
    return [loss, grads_of(model), x.grad]


def exactly(found: Any, expected: Any) -> None:
    same(found, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.pairwise
@schedules
@modes
@pytest.mark.parametrize(
    "ignored", [(), (0, 5), (0, 1, 2, 7), (9, 10), tuple(range(10)), tuple(range(ROWS))]
)
def test_loss_and_gradients_are_those_of_the_mean_over_counted_rows(
    schedule: str, checkpoint: str, ignored: tuple[int, ...]
) -> None:
    """Also if a whole micro-batch is ignored, the first or the last, or all of them."""
    model, (x, target) = a_model(), padded(*ignored)
    expected = plain_step(model, x, target)
    exactly(stepped(model, x, target, schedule=schedule, checkpoint=checkpoint), expected)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("there", ["cpu", "cuda:0", "cuda:1"])
def test_a_denominator_may_be_on_any_device_and_changed_afterwards(there: str) -> None:
    model, (x, target) = a_model(), padded(0, 1)
    expected = plain_step(model, x, target)
    count = number_of(target).to(there)
    with Pipe(model, [2, 3], devices=["cuda:0", "cuda:1"], chunks=CHUNKS) as pipe:
        loss = pipe.forward_backward(x, target=target, loss_fn=total, denominator=count)
        count.fill_(1)
        found = {name: None if g is None else g.cpu() for name, g in grads_of(model).items()}
    exactly([loss.cpu(), found], expected[:2])


def test_one_denominator_for_several_batches_accumulates_their_mean() -> None:
    model, (x, target) = a_model(), padded(0, 1, 7)
    loss, expected, _ = plain_step(model, x, target)
    parts, found = zip(x.detach().tensor_split([6]), target.tensor_split([6]), strict=True), []
    with pipe_of(model, [2, 3], chunks=CHUNKS) as pipe:
        for rows, wanted in parts:
            found.append(
                pipe.forward_backward(
                    rows, target=wanted, loss_fn=total, denominator=number_of(target)
                )
            )
    exactly([sum(found), grads_of(model)], [loss, expected])


def test_half_precision_overflows_no_sooner_than_with_a_mean() -> None:
    """With the scale of a mean, the sums of 1,000 rows would overflow: 100 * 1000."""
    seen = []

    def loss_fn(output: Any, target: Tensor) -> Any:
        output.register_hook(lambda gradient: seen.append(gradient.float().abs().max().item()))
        return output.float().sum()

    model = nn.Sequential(nn.Linear(2, 1, dtype=torch.float16))
    x = torch.ones(1000, 2, dtype=torch.float16)
    with pipe_of(model, chunks=4) as pipe:
        pipe.forward_backward(
            x, target=torch.zeros(1000), loss_fn=loss_fn, loss_scale=100.0, denominator=999
        )
    assert len(seen) == 4 and max(seen) < 0.2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# What is refused, and what is warned of -----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (NAN, ValueError, "finite and positive, got nan"),
        ("3", TypeError, "must be a number or a tensor of one element .* got str"),
        (torch.ones(1, requires_grad=True), TypeError, "requires no grad"),
        (torch.ones(2), TypeError, r"one element .* float32\[2\]"),
    ],
)
def test_a_denominator_that_is_none_is_refused(given: Any, error: Any, message: str) -> None:
    model, (x, target) = a_model(), padded()
    with pytest.raises(error, match=message):
        stepped(model, x, target, denominator=given)
    assert all(p.grad is None for p in model.parameters())
