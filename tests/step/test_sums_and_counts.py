"""Tests losses that return a sum and a count: the result is the mean over the mini-batch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.ways import MODES, grads_of, linear
from tests.layers import Apply
from tests.pipes import pipe_of

ROWS, CLASSES, CHUNKS = 11, 5, 4
IGNORED = -100
INF, NAN = float("inf"), float("nan")

schedules = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved"])
modes = pytest.mark.parametrize("checkpoint", MODES)


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


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


def plain(model: nn.Module, x: Tensor, target: Tensor, scale: float = 1.0) -> list[Any]:
    own, x = copy.deepcopy(model), x.detach().requires_grad_()
    loss = F.cross_entropy(own(x), target, ignore_index=IGNORED)
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), grads_of(own), x.grad]


def stepped(model: nn.Sequential, x: Tensor, target: Tensor, **options: Any) -> list[Any]:
    checkpoint = options.pop("checkpoint", None)
    options = {"loss_fn": counted, **options}
    x = x.detach().requires_grad_()
    balance = [2, 1, 1, 1] if options.get("schedule") == "interleaved" else [2, 2, 1]
    with pipe_of(model, balance, chunks=CHUNKS, checkpoint=checkpoint) as pipe:
        loss = pipe.forward_backward(x, target=target, **options)
    return [loss, grads_of(model), x.grad]


def same(found: Any, expected: Any, **options: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


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
    expected = plain(model, x, target)
    same(stepped(model, x, target, schedule=schedule, checkpoint=checkpoint), expected)


@pytest.mark.parametrize("kind", [int, float, lambda count: count.reshape(1).float()])
def test_a_count_is_a_number_or_a_tensor_of_one_element(kind: Any) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        total, count = counted(output, target)
        return total, kind(count)

    model, (x, target) = a_model(), padded(0, 1)
    same(stepped(model, x, target, loss_fn=loss_fn), plain(model, x, target))


@schedules
def test_weights_of_classes_count_as_much_as_they_weigh(schedule: str) -> None:
    weight = torch.rand(CLASSES, dtype=torch.float64)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(output, target, weight, reduction="sum"), weight[target].sum()

    model, (x, target) = a_model(), padded()
    own = copy.deepcopy(model)
    loss = F.cross_entropy(own(x), target, weight)
    loss.backward()  # type: ignore[no-untyped-call]
    found = stepped(model, x, target, loss_fn=loss_fn, schedule=schedule)
    same(found[:2], [loss.detach(), grads_of(own)])


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0)])
@schedules
def test_gradients_are_scaled_and_the_loss_is_not(schedule: str, scale: Any) -> None:
    model, (x, target) = a_model(), padded(0, 1, 2)
    expected = plain(model, x, target, 8.0)
    same(stepped(model, x, target, schedule=schedule, loss_scale=scale), expected)


@schedules
def test_a_gradient_that_other_tensors_share_is_corrected_once_for_each(schedule: str) -> None:
    """The gradients of two weights and the input are one tensor, which is added to no other."""
    bias, other = (nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64)) for _ in range(2))
    used = iter([True])

    def add(x: Tensor) -> Tensor:
        return x + bias[None] + other[None] if next(used, False) else x * 1.0

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return output[:, 0].sum(), (target != IGNORED).sum()

    layer = Apply(add)
    layer.bias, layer.other = bias, other
    _, target = padded(0)
    x = torch.randn(ROWS, CLASSES, dtype=torch.float64, requires_grad=True)
    with pipe_of(nn.Sequential(layer), chunks=CHUNKS, checkpoint="never") as pipe:
        pipe.forward_backward(x, target=target, loss_fn=loss_fn, schedule=schedule)
    assert bias.grad is not None and x.grad is not None
    same(bias.grad, other.grad)
    same(bias.grad[0].detach(), torch.tensor(3 / 10, dtype=torch.float64))
    same(x.grad[:, 0], torch.full((ROWS,), 1 / 10, dtype=torch.float64))


def test_sparse_gradients_are_corrected() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return output.sum(), (target != IGNORED).sum()

    embedding = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
    with pipe_of(nn.Sequential(embedding), chunks=CHUNKS) as pipe:
        pipe.forward_backward(
            torch.arange(ROWS) % 7, target=padded(0, 1)[1], loss_fn=loss_fn
        )
    assert embedding.weight.grad is not None
    counts = torch.tensor([2.0, 2, 2, 2, 1, 1, 1], dtype=torch.float64) / 9
    same(embedding.weight.grad.to_dense(), counts[:, None].expand(7, 3))


def test_half_precision_overflows_no_sooner_than_with_a_mean() -> None:
    """With the scale of a mean, the sums of 1,000 rows would overflow: 100 * 1000."""
    seen = []

    def loss_fn(output: Any, target: Tensor) -> Any:
        output.register_hook(lambda gradient: seen.append(gradient.float().abs().max().item()))
        return output.float().sum(), len(target) - 1

    model = nn.Sequential(nn.Linear(2, 1, dtype=torch.float16))
    x = torch.ones(1000, 2, dtype=torch.float16)
    with pipe_of(model, chunks=4) as pipe:
        pipe.forward_backward(x, target=torch.zeros(1000), loss_fn=loss_fn, loss_scale=100.0)
    assert len(seen) == 4 and max(seen) < 0.2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", 1 / 4), ("gpipe", 1 / 9)])
def test_hooks_of_layers_see_gradients_by_the_count_that_is_expected(
    schedule: str, expected: float
) -> None:
    """The count known when the first one runs backward: of the first micro-batch, or of all."""
    seen: set[float] = set()

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return output.sum(), (target != IGNORED).sum()

    layer = linear(6, 1)
    layer.register_full_backward_hook(lambda _, __, gradients: seen.update(gradients[0].flatten()))
    layer.weight.register_hook(lambda gradient: seen.add(-gradient.sum().item()))
    x, target = torch.ones(12, 6, dtype=torch.float64, requires_grad=True), torch.zeros(12)
    target[:2], target[4] = IGNORED, IGNORED
    with pipe_of(nn.Sequential(layer), chunks=4) as pipe:
        pipe.forward_backward(x, target=target, loss_fn=loss_fn, schedule=schedule)
    found = sorted({round(float(value), 9) for value in seen})
    assert found == sorted(round(value, 9) for value in (-12 * 6 / 9, expected))


# What is refused, and what is warned of -----------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda total, count: (total, -1), ValueError, "a count of -1.0; it must be finite"),
        (lambda total, count: (total, NAN), ValueError, "a count of nan"),
        (lambda total, count: (total, "3"), TypeError, "the count that loss_fn returns.* got str"),
        (lambda total, count: (total, total), TypeError, "requires grad; .* return_outputs=True"),
        (lambda total, count: (total, torch.ones(2)), TypeError, r"one element .* float32\[2\]"),
        (lambda total, count: (count, total, 1), TypeError, "return a sum and the number"),
        (lambda total, count: (3.0, count), TypeError, "must return a tensor of one element"),
    ],
)
def test_a_pair_that_is_none_is_refused(returned: Any, error: Any, message: str) -> None:
    model, (x, target) = a_model(), padded()
    with pytest.raises(error, match=message):
        stepped(model, x, target, loss_fn=lambda y, t: returned(*counted(y, t)))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("first", [True, False])
def test_a_pair_for_some_micro_batches_only_is_refused(first: bool) -> None:
    kinds = iter([first, not first, True, True])
    model, (x, target) = a_model(), padded()
    with pytest.raises(TypeError, match="some micro-batches and a tensor alone for others"):
        stepped(
            model, x, target, schedule="gpipe",
            loss_fn=lambda y, t: counted(y, t) if next(kinds) else y.sum(),
        )  # fmt: skip


def test_a_pair_where_losses_are_added_up_is_refused() -> None:
    model, (x, target) = a_model(), padded()
    with pytest.raises(TypeError, match="with reduction='sum' it must return a tensor of one"):
        stepped(model, x, target, reduction="sum")


def test_a_loss_that_is_not_finite_for_some_micro_batches_is_warned_of() -> None:
    model, (x, target) = a_model(), padded(0, 1, 2)
    with pytest.warns(RuntimeWarning, match="nan for micro-batch 0, and finite for the other 3"):
        loss, *_ = stepped(model, x, target, loss_fn=F.cross_entropy)
    assert loss.isnan()


def test_the_warning_shows_the_line_that_takes_the_step() -> None:
    model, (x, target) = a_model(), padded(0, 1, 2)
    with pipe_of(model, [5], chunks=CHUNKS) as pipe, pytest.warns(RuntimeWarning) as seen:
        pipe.forward_backward(x, target=target, loss_fn=F.cross_entropy)
    assert seen[0].filename == __file__


def test_a_warning_that_is_an_error_leaves_every_gradient_alone() -> None:
    model, (x, target) = a_model(), padded(0, 1, 2)
    with pytest.raises(RuntimeWarning):  # as they are in these tests
        stepped(model, x, target, loss_fn=F.cross_entropy)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("values", [[1.0] * 4, [NAN] * 4, [INF, -INF, NAN, NAN]])
def test_losses_that_are_all_finite_or_none_are_not_warned_of(values: list[float]) -> None:
    left = iter(values)
    model, (x, target) = a_model(), padded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(model, x, target, loss_fn=lambda y, t: y.sum() * 0 + next(left))
