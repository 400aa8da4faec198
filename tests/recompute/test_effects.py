"""Tests that a recomputation with another result than its forward is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, RecomputationError, is_recomputing
from pipert._torch import call_after_backward
from pipert.recompute import effects
from pipert.recompute.effects import Effects, sampled
from tests.helpers.ways import CALL, linear

SCHEDULES = [CALL, "gpipe", "1f1b"]
schedules = pytest.mark.parametrize("schedule", SCHEDULES)

OTHER = (
    "returned other values than its forward, so gradients would be wrong: in recomputation "
    r"R\[{i},{j}\]: partition {j} on cpu, micro-batch {i} of 2; .*checkpoint='never'"
)


class Layer(nn.Module):
    """A layer whose result is whatever a function makes of itself and its input."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.book: Tensor
        self.register_buffer("book", torch.ones(3))
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x * self.weight)


def moved(layer: Any, x: Tensor) -> Any:
    """Uses a codebook and moves it, as vector quantisation does."""
    y = x * layer.book.clone()
    with torch.no_grad():
        layer.book.lerp_(x.mean(0), 0.1)
    return y


def moved_in_forwards(layer: Any, x: Tensor) -> Any:
    y = x * layer.book.clone()
    if not is_recomputing():
        layer.book = layer.book + 0.1
    return y


def moved_unseen(layer: Any, x: Tensor) -> Any:
    y = x * layer.book.clone()
    layer.book.data.mul_(1.1)
    return y


def counted(layer: Any, x: Tensor) -> Any:
    layer.calls = getattr(layer, "calls", 0) + 1
    return x * layer.calls


def masked(layer: Any, x: Tensor) -> Any:
    return x * torch.bernoulli(torch.full_like(x, 0.9), generator=GENERATOR)


def other_in_one(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * (2 if is_recomputing() else 1)


def not_a_number(layer: Any, x: Tensor) -> Any:
    return x * (torch.nan if is_recomputing() else 1)


def infinite(layer: Any, x: Tensor) -> Any:
    return x * (1 if is_recomputing() else torch.inf)


def complex_numbers(layer: Any, x: Tensor) -> Any:
    return x * torch.tensor(1j if is_recomputing() else 1 + 0j)


def from_left_to_right(layer: Any, x: Tensor) -> Any:
    return (x * (2 if is_recomputing() else 1)).t().contiguous().t()


GENERATOR = torch.Generator().manual_seed(0)
WRONG = [
    moved, moved_in_forwards, moved_unseen, counted, masked, other_in_one, not_a_number, infinite,
    complex_numbers, from_left_to_right,
]  # fmt: skip


def total(y: Any, _: Any = None) -> Any:
    parts = y if isinstance(y, tuple) else (y,)
    return sum(part.abs().sum() for part in parts)


def step(module: nn.Sequential, schedule: str, rows: int = 400) -> None:
    """Takes a step of two micro-batches, with a partition for each layer."""
    n = len(module)
    x = torch.linspace(1, 2, rows * 3).view(rows, 3)
    with Pipe(module, [1] * n, devices=["cpu"] * n, chunks=2, checkpoint="always") as pipe:
        if schedule == CALL:
            total(pipe(x)).backward()
        else:
            pipe.forward_backward(x, loss_fn=total, schedule=schedule, reduction="sum")


@schedules
@pytest.mark.parametrize("compute", WRONG)
def test_a_recomputation_with_other_values_is_refused(
    compute: Callable[..., Any], schedule: str
) -> None:
    layer = Layer(compute)
    with pytest.raises(RecomputationError, match=OTHER.format(i="[01]", j=0)):
        step(nn.Sequential(layer), schedule)
    if schedule != CALL:  # before any gradient arrives
        assert layer.weight.grad is None


@schedules
def test_the_error_names_the_partition_and_the_first_micro_batch(schedule: str) -> None:
    first = Layer(lambda layer, x: x)
    second = Layer(lambda layer, x: x * (1 + is_recomputing()))
    with pytest.raises(RecomputationError, match=OTHER.format(i=0, j=1)):
        step(nn.Sequential(first, second), schedule)


@schedules
@pytest.mark.parametrize(
    "compute",
    [
        lambda layer, x: x[:, : 2 if is_recomputing() else 3],
        lambda layer, x: x.double() if is_recomputing() else x,
        lambda layer, x: (x,) if is_recomputing() else (x, x + 1),
    ],
    ids=["shape", "dtype", "number"],
)
def test_other_shapes_dtypes_and_numbers_of_outputs_are_refused_at_once(
    compute: Callable[..., Any], schedule: str
) -> None:
    with pytest.raises(RecomputationError, match=r"returned \(float.* and its forward \(float"):
        step(nn.Sequential(Layer(compute)), schedule)


def nearly(layer: Any, x: Tensor) -> Any:
    return x * (1 + 1e-3 * is_recomputing())


def other_in_few(layer: Any, x: Tensor) -> Any:
    return torch.where(torch.arange(len(x)).view(-1, 1) == 0, x * (1 + is_recomputing()), x)


def the_same(layer: Any, x: Tensor) -> Any:
    layer.book.fill_(2)
    return x * layer.book.clone()


def grown(layer: Any, x: Tensor) -> Any:
    if len(layer.book) < 6:
        layer.register_buffer("book", torch.arange(6.0), persistent=False)
    return x * layer.book[1:4]


def initialised(layer: Any, x: Tensor) -> Any:
    if layer.book[0] == 1:
        layer.book[:] = 3
    return x * layer.book.clone()


def without_number(layer: Any, x: Tensor) -> Any:
    return torch.cat([x * torch.nan, x * torch.inf, x * 0, x])


def expanded(layer: Any, x: Tensor) -> Any:
    return x[:, :1].expand(-1, 300)


def of_no_rows(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x[:, :0]


@schedules
@pytest.mark.parametrize(
    "compute",
    [
        nearly, other_in_few, the_same, grown, initialised, without_number, expanded, of_no_rows,
    ],
)  # fmt: skip
def test_a_recomputation_with_the_same_result_is_not_refused(
    compute: Callable[..., Any], schedule: str
) -> None:
    layer = Layer(compute)
    step(nn.Sequential(layer), schedule)
    assert layer.weight.grad is not None


def test_each_backward_is_checked() -> None:
    layer, is_other = Layer(lambda layer, x: x * (2 if is_other else 1)), False
    with Pipe(nn.Sequential(layer), [1], devices=["cpu"], checkpoint="always") as pipe:
        y = pipe(torch.ones(4, 3)).sum()
        y.backward(retain_graph=True)
        torch.autograd.grad(y, layer.weight, retain_graph=True)
        is_other = True
        with pytest.raises(RecomputationError, match="other values"):
            y.backward(retain_graph=True)
        is_other = False
        y.backward()


def test_a_recomputation_outside_of_a_backward_is_checked_at_once() -> None:
    kept = list[Any]()

    def forward(layer: Layer, x: Tensor) -> Tensor:
        kept.append((x * (1 + is_recomputing())).exp())
        y: Tensor = kept[-1] * 2
        return y

    with Pipe(nn.Sequential(Layer(forward)), [1], devices=["cpu"], checkpoint="always") as pipe:
        pipe(torch.ones(4, 3))
        with pytest.raises(RecomputationError, match="other values"):
            kept[0].grad_fn._saved_result  # noqa: B018


@pytest.mark.parametrize(
    "shape", [(), (3,), (1000, 2), (7, 3, 31, 33), (2, 2, 2, 2, 2, 2, 2, 2, 2)], ids=str
)
def test_a_sample_is_small_and_spread(shape: tuple[int, ...]) -> None:
    y = torch.arange(float(torch.Size(shape).numel()), requires_grad=True)
    ((_, _, values),) = sampled([y.view(shape)])
    assert values is not None
    assert min(100, y.numel()) <= values.numel() <= 256
    assert len(torch.unique(values)) == values.numel()
    assert values.max() >= y.numel() / 2 - 1


def test_samples_of_all_tasks_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    check = Effects.check

    def note(self: Effects, *streams: Any) -> None:
        compared.append(len(self._pairs))
        check(self, *streams)

    monkeypatch.setattr(Effects, "check", note)
    module = nn.Sequential(*[Layer(lambda layer, x: x) for _ in range(2)])
    step(module, "1f1b")
    step(module, CALL)
    assert compared[0] == 4 and sum(compared[1:]) == 4 and 4 in compared[1:]


def test_a_layer_in_evaluation_mode_whose_buffer_has_changed_is_refused() -> None:
    norm = nn.BatchNorm1d(4, dtype=torch.float64).eval()
    model = nn.Sequential(linear(3, 4), norm)
    with Pipe(model, [2], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
        y = pipe(torch.randn(4, 3, dtype=torch.float64))
        norm.get_buffer("running_mean").add_(1)
        with pytest.raises(RecomputationError, match="other values"):
            y.sum().backward()


def step_of(compute: Callable[[Tensor], Any], x: Tensor) -> None:
    module = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), Computing(compute))
    with Pipe(module, [2], devices=["cpu"], chunks=1, checkpoint="always") as pipe:
        pipe.forward_backward(x, loss_fn=lambda y, _: sum_of(y))


def sum_of(y: Any) -> Tensor:
    return torch.stack([part.sum() for part in (y if isinstance(y, tuple) else (y,))]).sum()


class Computing(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(x)


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_what_a_mask_fills_in_hides_no_other_values(fill: float) -> None:
    def compute(x: Tensor) -> Tensor:
        x = x * torch.bernoulli(torch.full_like(x, 0.5), generator=GENERATOR)
        return torch.cat([torch.full_like(x[..., :8], fill), x[..., 8:]], -1)

    with pytest.raises(RecomputationError, match="other values"):
        step_of(compute, torch.randn(8, 64))


def test_a_token_that_rounding_sends_to_another_expert_is_not_refused() -> None:
    def compute(x: Tensor) -> Tensor:
        if is_recomputing():
            return torch.cat([x[:, :160], -x[:, 160:161], x[:, 161:]], 1)
        return x

    step_of(compute, torch.randn(1, 512, 48))


def test_what_rounding_leaves_of_zero_may_be_another_number() -> None:
    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (x - x.mean()).mean() + (3e-7 if is_recomputing() else -2e-7)

    step_of(compute, torch.randn(8, 16))


@pytest.mark.cuda
def test_samples_of_a_call_are_compared_on_a_stream_that_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no gradient arrives on a GPU, autograd may call back with default streams."""
    make: Any = torch.cuda.Stream
    own = make("cuda:0")
    found, differ = list[Any](), effects._differ

    def on_another_thread(check: Callable[[], None]) -> None:
        def run() -> None:
            thread = threading.Thread(target=check)
            thread.start()
            thread.join()

        call_after_backward(run)

    def note(pairs: Any) -> Tensor:
        found.append(torch.cuda.current_stream())
        return differ(pairs)

    monkeypatch.setattr(effects, "call_after_backward", on_another_thread)
    monkeypatch.setattr(effects, "_differ", note)
    devices = ["cuda:0", "cuda:0"]
    with (
        Pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [1, 1], devices=devices, chunks=2,
             checkpoint="always") as pipe,
        torch.cuda.stream(own),
    ):  # fmt: skip
        pipe(torch.randn(4, 3)).sum().backward()
    assert found and own not in found
