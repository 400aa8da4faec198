"""Tests what is recomputed, how often, and layers that differentiate."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipert import NestedCheckpointError, Pipe, RecomputationError, is_recomputing, pipeline
from pipert.schedules.plan import NAMED
from tests.helpers.ways import (
    CALL,
    MODES,
    SCHEDULES,
    Way,
    assert_equal,
    batch,
    each_way,
    linear,
    mean,
    piped,
    take_step,
)
from tests.layers import Apply


class RootOfZero(nn.Module):
    """A layer with a gradient of infinity times zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0)  # the line that anomaly detection has to find


@each_way
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode_traces_nan_in_the_backward_to_the_line_of_the_layer(way: Way) -> None:
    module = nn.Sequential(linear(3, 3), RootOfZero(), linear(3, 3))
    with piped(module, [2, 1], way, chunks=2) as pipe, torch.autograd.detect_anomaly():
        with pytest.warns(UserWarning) as seen:
            with pytest.raises(RuntimeError, match="MulBackward0.*returned nan"):
                take_step(pipe, way, batch(4))
    assert any("the line that anomaly detection has to find" in str(each.message) for each in seen)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(off: Any) -> None:
    with piped(nn.Sequential(linear(3, 3), linear(3, 3)), [1, 1], Way("1f1b", "never")) as pipe:
        with off(), pytest.raises(RuntimeError, match="computes gradients, which are disabled"):
            pipe.forward_backward(batch(4), loss_fn=mean)


# Layers that differentiate.


class Force(nn.Module):
    """A layer that returns minus the gradient of an energy by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.energy(own).sum(), own, create_graph=True)
        return x - grad


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_may_differentiate_in_its_forward(schedule: str) -> None:
    module = nn.Sequential(linear(3, 3), Force(), linear(3, 2))
    assert_equal(module, [1, 2], Way(schedule, "never"), batch(7))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_that_differentiates_cannot_be_recomputed(schedule: str) -> None:
    module = nn.Sequential(linear(3, 3), Force(), linear(3, 2))
    with piped(module, [1, 2], Way(schedule, "always"), chunks=2) as pipe:
        with pytest.raises(RecomputationError, match="checkpoint='never'"):
            pipe.forward_backward(batch(4), loss_fn=mean, schedule=schedule)


def back_in_layer(y: Tensor) -> Tensor:
    y.square().sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return y


def back_in_loss(y: Tensor, _: Any) -> Tensor:
    return back_in_layer(y).sum()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("layer", "loss_fn", "checkpoint"),
    [
        (Apply(back_in_layer), mean, "never"),
        (nn.Tanh(), back_in_loss, "never"),
        (nn.Tanh(), back_in_loss, "always"),
    ],
    ids=["layer", "loss", "loss, recomputed"],
)
def test_a_backward_that_would_lose_the_gradients_of_earlier_layers_is_refused(
    layer: nn.Module, loss_fn: Any, checkpoint: str, schedule: str
) -> None:
    first = linear(3, 3)
    with piped(nn.Sequential(first, layer), [1, 1], Way(schedule, checkpoint), chunks=2) as pipe:
        with pytest.raises(RuntimeError, match="would be lost|into an earlier partition"):
            pipe.forward_backward(batch(4), loss_fn=loss_fn, schedule=schedule)
    assert first.weight.grad is None


def with_functional_gradient(x: Tensor) -> Any:
    return x * torch.func.grad(lambda z: z.sin().sum())(x)


def with_jacobian(x: Tensor) -> Any:
    return torch.func.vmap(torch.func.jacrev(lambda z: z.sin() * z))(x).sum(-1)


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("function", [with_functional_gradient, with_jacobian])
def test_a_functional_gradient_in_a_layer_is_right_or_refused_where_it_is_recomputed(
    function: Any, way: Way
) -> None:
    module = nn.Sequential(linear(3, 3), Apply(function), linear(3, 2))
    if way.checkpoint == "never":
        assert_equal(module, [1, 2], way, batch(7))
        return
    refused = pytest.raises(RuntimeError, match="support saved tensor hooks")
    with piped(module, [1, 2], way) as pipe, refused as seen:
        take_step(pipe, way, batch(7))
    assert "in forward F[0,1]" in seen.value.__notes__[0] and "layer '1'" in seen.value.__notes__[0]


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_torch_in_a_layer_is_right_or_refused_where_it_is_reentrant(
    use_reentrant: bool, way: Way
) -> None:
    def nested(x: Tensor) -> Any:
        return checkpoint(torch.sin, x, use_reentrant=use_reentrant)

    module = nn.Sequential(linear(3, 3), Apply(nested), linear(3, 2))
    if way.schedule == CALL or not use_reentrant:
        assert_equal(module, [1, 2], way, batch(7))
        return
    refused = pytest.raises(NestedCheckpointError, match="Use use_reentrant=False")
    with piped(module, [1, 2], way) as pipe, refused as seen:
        take_step(pipe, way, batch(7))
    assert "in backward B" in seen.value.__notes__[0]
    assert all(parameter.grad is None for parameter in module.parameters())


# Which micro-batches are recomputed.


def recomputed(pipe: Pipe, **options: Any) -> int:
    """Returns how many of four micro-batches are recomputed."""
    calls.clear()
    pipe.forward_backward(batch(4), loss_fn=mean, **options)
    return len(calls)


calls: list[bool] = []


class Counts(nn.Module):
    """A layer that counts its recomputations and can be pickled."""

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            calls.append(True)
        return x.tanh()  # saves something, or nobody would need it again


def counting(**options: Any) -> Pipe:
    module = nn.Sequential(linear(3, 3), Counts(), linear(3, 3))
    return Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=4, **options)


CHOICES = [
    (None, "1f1b", 0), (None, "eager-1f1b", 0), (None, "interleaved", 0), (None, "gpipe", 3),
    ("never", "1f1b", 0), ("never", "gpipe", 0),
    ("except_last", "1f1b", 3), ("except_last", "gpipe", 3),
    ("always", "1f1b", 4), ("always", "gpipe", 4),
]  # fmt: skip


@pytest.mark.parametrize(("chosen", "schedule", "expected"), CHOICES)
def test_the_mode_that_was_chosen_says_what_is_recomputed(
    chosen: str | None, schedule: str, expected: int
) -> None:
    with counting(checkpoint=chosen) as pipe:
        for way in (schedule, schedule.upper(), NAMED[schedule]):
            assert recomputed(pipe, schedule=way) == expected


M = 4
modes = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])


def rows(m: int = M) -> Tensor:
    """Makes ``m`` micro-batches of one row, whose first column is its number."""
    return torch.cat([torch.arange(float(m)).unsqueeze(1), torch.rand(m, 2)], 1)


def total(y: Tensor, _: Any) -> Tensor:
    return y.square().sum()


def step(model: nn.Module, checkpoint: str, loss_fn: Callable[..., Tensor] = total) -> Tensor:
    layers = nn.Sequential(model, nn.Linear(3, 3))  # drawn before the rows
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=M, checkpoint=checkpoint) as pipe:
        loss: Tensor = pipe.forward_backward(
            rows(), loss_fn=loss_fn, reduction="sum", schedule="1f1b"
        )
    return loss


class Experts(nn.Module):
    """A layer with a weight for each micro-batch, used by equally many operations."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        for k, weight in enumerate(weights):
            if isinstance(weight, nn.Parameter):
                self.register_parameter(f"expert{k}", weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[int(x[0, 0].item())]


@modes
@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_])
def test_each_micro_batch_may_use_other_weights(
    checkpoint: str, make: Callable[[Tensor], Tensor]
) -> None:
    """The weights are parameters, or tensors that a layer keeps for itself."""
    weights = [make(torch.full((3,), float(k))) for k in range(M)]
    step(Experts(weights), checkpoint)
    grads = [weight.grad for weight in weights]
    assert all(grad is not None and grad.any() for grad in grads)


CHUNKS, SIZE = 4, 8
EVERY = [CALL, "gpipe", "1f1b", "eager-1f1b", "zb-h1"]


class Counted(nn.Module):
    """A layer that has its calls counted and uses one of its weights twice."""

    def __init__(self, count: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.norm, self.count = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), count

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        y = torch.tanh(self.norm(self.linear(x)))
        return x + nn.functional.linear(y, self.linear.weight)


def of_kind(kind: str, module: nn.Sequential, mode: str) -> Any:
    options: Any = {"devices": ["cpu"] * 2, "chunks": CHUNKS, "checkpoint": mode}
    if kind == "Pipe":
        return Pipe(module, [2, 2], **options)
    return pipeline(module, ["2"], example=torch.ones(4, SIZE), **options)


Region = Callable[[], contextlib.AbstractContextManager[object]]
REGIONS: dict[str, Region] = {
    "no autocast": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("region", REGIONS)
def test_each_layer_runs_once_and_once_again_where_it_is_recomputed(
    region: str, schedule: str, mode: str, kind: str
) -> None:
    torch.manual_seed(0)
    calls = Counter[str]()
    first, shared, third = [Counted(partial(calls.update, [name])) for name in "abc"]
    with of_kind(kind, nn.Sequential(first, shared, third, shared), mode) as pipe:
        calls.clear()
        for _ in range(2):
            with REGIONS[region]():
                take_step(pipe, Way(schedule, mode), torch.randn(8, SIZE), loss_fn=_loss)
    recomputed = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[mode]
    once = 2 * (CHUNKS + recomputed)
    assert calls == {"a": once, "b": 2 * once, "c": once}


def _loss(y: Tensor, _: Any) -> Tensor:
    return y.float().square().mean()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dys[0] @ weight, dys[0].t() @ x


class Fused(Counted):
    def forward(self, x: Tensor) -> Any:
        self.count()
        return x + _Product.apply(x, self.linear.weight).tanh()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
@pytest.mark.parametrize("schedule", [CALL, "1f1b", "zb-h1"])
def test_functions_in_python_beside_hooks_on_weights_are_recomputed_once(
    schedule: str, kind: str
) -> None:
    calls = Counter[str]()
    layers = [Fused(partial(calls.update, [name])) for name in "abcd"]
    for layer in layers:
        weight: Any = layer.linear.weight
        weight.register_hook(lambda gradient: gradient)
    with of_kind(kind, nn.Sequential(*layers), "always") as pipe:
        calls.clear()
        take_step(pipe, Way(schedule, "always"), torch.randn(8, SIZE), loss_fn=_loss)
    assert calls == dict.fromkeys("abcd", 2 * CHUNKS)
