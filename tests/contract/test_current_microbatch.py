"""Tests that layers, hooks and loss functions can tell which micro-batch they work on.

Micro-batch *i* has one row of ``i + 1``. Layers multiply by one, and the loss by ``i + 1``, so
values and gradients say which micro-batch it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, current_microbatch, is_recomputing

M = 4
CPUS, GPUS = ["cpu"] * 2, ["cuda:0", "cuda:1"]
cuda = [pytest.mark.cuda, pytest.mark.multi_gpu]
devices = pytest.mark.parametrize(
    "devices", [CPUS, pytest.param(GPUS, marks=cuda)], ids=["CPU", "GPUs"]
)


class Seen:
    """What code has seen: in which phase, the current micro-batch, the one that values tell."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int | None, int]] = []

    def note(self, phase: str, tensor: Tensor) -> None:
        true = round(tensor.detach()[0, 0].item()) - 1
        self.all.append((phase, current_microbatch(), true))


class Product(nn.Module):
    """Multiplies by a weight of ones; notes what its forward, and hooks in its backward, see."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.note("R" if is_recomputing() else "F", x)
        y: Any = x @ self.weight
        if y.requires_grad:
            y.register_hook(lambda dy: self.seen.note("B", dy))
        return y  # type: ignore[no-any-return]


class HookedProduct(Product):
    """The same, with a backward hook of the module, too."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self.register_full_backward_hook(self.see)

    def see(self, _: nn.Module, dx: Any, dy: Any) -> None:
        self.seen.note("B", dy[0])


class TransposedProduct(Product):
    """The same, with a hook on the gradient of its transposed weight, which ``W`` computes."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight.t()
        if weight.requires_grad:
            weight.register_hook(lambda dw: self.seen.note("W", dw.sqrt()))
        return x @ weight  # type: ignore[no-any-return]


def values() -> Tensor:
    return torch.arange(1.0, M + 1).view(M, 1).repeat(1, 2).requires_grad_()


def make(devices: list[str], *layers: nn.Module, checkpoint: str = "never") -> Pipe:
    module = nn.Sequential(*layers)
    return Pipe(module, [1, 1], devices=devices, chunks=M, checkpoint=checkpoint)


def loss_that_notes(seen: Seen) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        seen.note("loss", y)
        return (y * target).sum()

    return loss_fn


@pytest.mark.pairwise
@devices
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_in_all_tasks_of_a_step(
    devices: list[str], checkpoint: str, schedule: str
) -> None:
    seen, x = Seen(), values()
    with make(devices, Product(seen), HookedProduct(seen), checkpoint=checkpoint) as pipe:
        pipe.forward_backward(
            x, target=x.detach(), loss_fn=loss_that_notes(seen), schedule=schedule, reduction="sum"
        )
    assert {phase for phase, *_ in seen.all} - {"R"} == {"F", "B", "loss"}
    assert any(phase == "R" for phase, *_ in seen.all) == (checkpoint == "always")
    assert [found for _, found, _ in seen.all] == [true for *_, true in seen.all]
    assert {true for *_, true in seen.all} == set(range(M)) and current_microbatch() is None


@devices
def test_in_gradients_of_weights_that_were_put_off(devices: list[str]) -> None:
    seen, x = Seen(), values()
    layers = TransposedProduct(seen), TransposedProduct(seen)
    with make(devices, *layers) as pipe:
        pipe.forward_backward(
            x, target=x.detach(), loss_fn=loss_that_notes(Seen()), schedule="zb-h1", reduction="sum"
        )
    assert sorted(seen.all) == [("W", i, i) for i in range(M) for _ in range(2)]


@devices
def test_in_the_forward_and_the_recomputations_of_a_call(devices: list[str]) -> None:
    seen, x = Seen(), values()
    with make(devices, Product(seen), HookedProduct(seen), checkpoint="always") as pipe:
        y = pipe(x)
        torch.autograd.backward((y * x.detach().to(y.device)).sum())
    of_tasks = [(found, true) for phase, found, true in seen.all if phase != "B"]
    assert len(of_tasks) == 4 * M and all(found == true for found, true in of_tasks)
    assert {found for phase, found, _ in seen.all if phase == "B"} == {None}
    assert current_microbatch() is None
