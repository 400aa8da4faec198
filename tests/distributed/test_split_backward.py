"""Schedules of torch that split each backward in two: for inputs first, for weights later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert import distributed
from tests.distributed.ranks import in_sweep, run

SCHEDULES = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


class Aside(nn.Module):
    """Also returns what it computes from an input without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.aside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.way(x).tanh(), self.aside(x.detach())


class Both(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] + value[1]


class Apart(nn.Module):
    """Its weight is used beside the way from the input, and in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, x.detach() @ self.weight


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    if kind == "aside":
        layers[2:4] = [nn.Tanh(), Aside()]
        layers[4] = Both()
    if kind == "apart":
        layers[2:4] = [nn.Tanh(), Apart()]
        layers[4] = Both()
    module = nn.Sequential(*layers)
    if kind == "frozen":
        module[0].requires_grad_(False)
    return module


def counted(y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weights = (target[:, 0] > 0).float()
    return (mse_loss(y, target, reduction="none").mean(1) * weights).sum(), weights.sum()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def steps(rank: int, schedule: str, kind: str) -> tuple[list[Tensor], dict[str, Any]]:
    pipe = distributed.Pipe(
        model(kind), [2, 2, 2, 2], chunks=4, schedule=schedule, checkpoint="never"
    )
    x, target = batch()
    losses = [pipe.forward_backward(x, target=target, loss_fn=counted) for _ in range(2)]
    return losses, {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("InterleavedZeroBubble", "frozen"), ("ZBVZeroBubble", "aside"), ("DualPipeV", "apart")]
    + [
        in_sweep(schedule, kind)
        for schedule, kind in [
            ("InterleavedZeroBubble", "aside"), ("InterleavedZeroBubble", "apart"),
            ("ZBVZeroBubble", "frozen"), ("ZBVZeroBubble", "apart"), ("DualPipeV", "frozen"),
            ("DualPipeV", "aside"), *[(schedule, "plain") for schedule in SCHEDULES],
        ]
    ],
)  # fmt: skip
def test_weights_on_no_way_from_an_input_get_their_gradients(schedule: str, kind: str) -> None:
    """Behind a frozen partition, or beside what a layer detaches."""
    plain = model(kind)
    x, target = batch()
    for _ in range(2):
        total, count = counted(plain(x), target)
        torch.autograd.backward(total / count)
    named = dict(plain.named_parameters())
    seen = set()
    for losses, gradients in run(2, steps, schedule, kind):
        for loss in losses:
            torch.testing.assert_close(loss, (total / count).detach())
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, named[name].grad)
            seen.add(name)
    assert seen == set(named)
