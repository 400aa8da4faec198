"""Tests torch's schedules that split each backward in two: for inputs first, for weights later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert import distributed
from pipert.autograd.weight_gradients import compute_deferred
from pipert.distributed import rank_stage
from tests.distributed.launcher import run

SCHEDULES = ["InterleavedZeroBubble", "ZBVZeroBubble"]


class Aside(nn.Module):
    """Also returns what it computes from an input without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.aside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.way(x).tanh(), self.aside(x.detach())


class Both(nn.Module):
    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        return value[0] + value[1]


class Apart(nn.Module):
    """Its weight is used beside the way from the input, and in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, x.detach() @ self.weight


class Given(nn.Module):
    """Also returns its parameter, or what is saved for its gradient."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.itself = itself

    def forward(self, x: Tensor) -> Any:
        return x, self.weight if self.itself else x * self.weight, torch.zeros(8).view(1, 8)


class Own(nn.Module):
    """A layer that trains a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, 8).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    if kind == "aside":
        layers[2:4] = [nn.Tanh(), Aside()]
        layers[4] = Both()
    if kind == "apart":
        layers[2:4] = [nn.Tanh(), Apart()]
        layers[4] = Both()
    if kind in ("parameter", "saved"):
        layers[3:5] = [Given(kind == "parameter"), Both()]
    if kind == "view":
        layers[3:5] = [nn.Unflatten(1, (2, 4)), nn.Flatten()]
    if kind == "twice":
        first, again = nn.Linear(8, 8), nn.Linear(8, 8)
        again.weight = first.weight
        layers[2] = nn.Sequential(first, nn.Linear(8, 8), again)
    if kind == "own":
        layers[3] = Own()
    module = nn.Sequential(*layers)
    if kind == "frozen":
        module[0].requires_grad_(False)
    return module


def weighted(y: Tensor, target: Tensor) -> Tensor:
    return mse_loss(y, target, reduction="none").mean(1)[target[:, 0] > 0].sum()


def number_of(target: Tensor) -> Tensor:
    return (target[:, 0] > 0).sum()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def grads_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns gradients by name, including those of tensors that layers train for themselves."""
    found = {name: p.grad for name, p in module.named_parameters()}
    own = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, Own)]
    return found | {f"{name}.scale": layer.scale.grad for name, layer in own}


def steps(rank: int, schedule: str, kind: str) -> tuple[list[Tensor], dict[str, Any]]:
    pipe = distributed.Pipe(
        model(kind), [2, 2, 2, 2], chunks=4, schedule=schedule, checkpoint="never"
    )
    x, target = batch()
    how: Any = {"loss_fn": weighted, "denominator": number_of(target)}
    if kind == "own":
        how = {"loss_fn": mse_loss}
    losses = [pipe.forward_backward(x, target=target, **how) for _ in range(2)]
    return losses, grads_of(pipe)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("InterleavedZeroBubble", "frozen"), ("ZBVZeroBubble", "aside"), ("ZBVZeroBubble", "apart"),
        ("InterleavedZeroBubble", "parameter"), ("ZBVZeroBubble", "view"),
        ("ZBVZeroBubble", "saved"), ("InterleavedZeroBubble", "twice"), ("ZBVZeroBubble", "own"),
    ],
)  # fmt: skip
def test_gradients_are_the_plain_modules(schedule: str, kind: str) -> None:
    """Behind a frozen partition, beside what a layer detaches, of weights that are used twice; and
    where what a partition returns is a view, a parameter, or saved."""
    plain = model(kind)
    x, target = batch()
    for _ in range(2):
        mean = weighted(plain(x), target) / number_of(target)
        loss = mse_loss(plain(x), target) if kind == "own" else mean
        torch.autograd.backward(loss)
    named = grads_of(plain)
    seen = set()
    for losses, gradients in run(2, steps, schedule, kind):
        for found in losses:
            torch.testing.assert_close(found, loss.detach())
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, named[name])
            seen.add(name)
    assert seen == set(named)


def deferred(rank: int, schedule: str) -> list[int]:
    """Returns how many uses of weights each second half has computed."""
    counts: list[int] = []

    def counting(later: list[Any]) -> Any:
        counts.append(len(later))
        return compute_deferred(later)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_stage, "compute_deferred", counting)
        steps(rank, schedule, "plain")
    return counts


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_wait_for_the_second_half(schedule: str) -> None:
    for counts in run(2, deferred, schedule):
        assert len(counts) > 4 and all(counts)
