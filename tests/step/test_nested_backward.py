"""Tests functions that call ``backward()`` in their backward, as reversible networks do.

What they add to ``.grad`` passes no sums of the step.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipert
from tests.contract.ways import grads_of, same

schedules = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
kinds = pytest.mark.parametrize("kind", ["layers", "any model"])
modes = pytest.mark.parametrize("checkpoint", ["never", "always"])


class Rerun(torch.autograd.Function):
    """Runs a module again in its backward, and goes back through that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            found: Tensor = x + module(x)
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(x + ctx.module(x), dy)
        return x.grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Rerun.apply(x, self.inner)  # type: ignore[no-untyped-call]
        return found


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8).double(), Block(), Block(), nn.Linear(8, 8).double())


def pipe_of(model: nn.Sequential, kind: str, checkpoint: str) -> Any:
    settings: Any = {"devices": ["cpu"] * 2, "chunks": 4, "checkpoint": checkpoint}
    if kind == "layers":
        return pipert.Pipe(model, [2, 2], **settings)
    return pipert.pipeline(model, ["2"], **settings)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


@schedules
@kinds
@modes
def test_gradients_add_up_over_steps_as_in_the_plain_module(
    schedule: str, kind: str, checkpoint: str
) -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    with pipe_of(model, kind, checkpoint) as pipe:
        for _ in range(3):
            x, target = batch()
            F.mse_loss(plain(x), target).backward()  # type: ignore[no-untyped-call]
            pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, schedule=schedule)
    same(grads_of(model), grads_of(plain))


@schedules
@kinds
@modes
@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.parametrize("where", ["task", "end"])
def test_a_step_that_fails_leaves_no_part_of_a_gradient(
    schedule: str, kind: str, checkpoint: str, has_grads: bool, where: str
) -> None:
    model, calls = make_model(), list[int]()

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if where == "task" and len(calls) == 4:
            raise ValueError("a bad row")
        return F.mse_loss(y, target) * (float("nan") if len(calls) == 4 else 1.0)

    x, target = batch()
    if has_grads:
        F.mse_loss(model(x), target).backward()  # type: ignore[no-untyped-call]
    before = grads_of(model)
    with pipe_of(model, kind, checkpoint) as pipe:
        with pytest.raises(ValueError if where == "task" else RuntimeWarning):
            pipe.forward_backward(x, target=target, loss_fn=loss_fn, schedule=schedule)
        assert len(calls) == 4
        same(grads_of(model), before)
        plain = copy.deepcopy(model)  # without gradients
        for name, weight in plain.named_parameters():
            grad = before[name]
            weight.grad = None if grad is None else grad.clone()
        F.mse_loss(plain(x), target).backward()  # type: ignore[no-untyped-call]
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, schedule=schedule)
    same(grads_of(model), grads_of(plain))
