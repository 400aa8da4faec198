"""Tests steps through functions that call backward in their backward, as reversible layers do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from tests.helpers.ways import batch, grads_of, same
from tests.layers import Labelled

mse = nn.functional.mse_loss


class Rerun(torch.autograd.Function):
    """Computes ``x + f(x)`` without a graph, and again with one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + f(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(x + ctx.f(x), dy)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return Rerun.apply(x, self.f)  # type: ignore[no-any-return, no-untyped-call]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Reversible(), Reversible()).double()


def on_cpu(module: nn.Module) -> dict[str, Tensor | None]:
    return {k: None if dw is None else dw.cpu() for k, dw in grads_of(module).items()}


Make = Callable[[nn.Sequential], Any]


@pytest.fixture(
    params=[
        ["cpu"] * 2,
        pytest.param(["cuda:0", "cuda:1"], marks=[pytest.mark.cuda, pytest.mark.multi_gpu]),
    ],
    ids=["CPU", "GPUs"],
)
def make(request: pytest.FixtureRequest) -> Make:
    return lambda module: Pipe(module, [1, 2], devices=request.param, chunks=4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_gradients_are_the_plain_module_s(make: Make, schedule: str) -> None:
    module, x, target = layers(), batch(8).double(), batch(8).double() + 1
    plain = copy.deepcopy(module)
    with make(module) as pipe:
        for _ in range(2):  # the second step adds to what the first has left
            torch.autograd.backward(mse(plain(x), target))
            pipe.forward_backward(x, target=target, loss_fn=mse, schedule=schedule)
            same(on_cpu(module), grads_of(plain))


@pytest.mark.parametrize("kind", [Tensor, Labelled])
def test_a_step_that_fails_adds_nothing(make: Make, kind: type[Tensor]) -> None:
    module, x = layers(), batch(8).double()
    inner: Any = module[1]
    inner.f[0].weight = nn.Parameter(inner.f[0].weight.detach().as_subclass(kind))
    losses = list[Tensor]()

    def fail_at_the_end(y: Tensor, target: Tensor) -> Tensor:
        losses.append(y)
        if len(losses) % 4 == 0:
            raise ValueError("bad row")
        return mse(y, target)

    with make(module) as pipe:
        with pytest.raises(ValueError, match="bad row"):
            pipe.forward_backward(x, target=x, loss_fn=fail_at_the_end)
        assert all(p.grad is None for p in module.parameters())
        pipe.forward_backward(x, target=x, loss_fn=mse)
        before = [(p, p.grad, p.grad.clone()) for p in module.parameters() if p.grad is not None]
        assert len(before) == 6
        with pytest.raises(ValueError, match="bad row"):
            pipe.forward_backward(x, target=x, loss_fn=fail_at_the_end)
        for parameter, gradient, value in before:
            assert parameter.grad is gradient
            same(gradient, value)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_hook_is_called_once_with_the_whole(make: Make, method: str, schedule: str) -> None:
    module, x, seen = layers(), batch(8).double(), list[Tensor]()
    plain, weight = copy.deepcopy(module), list(module.parameters())[2]  # of the first such layer
    is_on_grad = method != "register_hook"
    getattr(weight, method)(lambda x: seen.append(x.grad.clone() if is_on_grad else x))
    torch.autograd.backward(mse(plain(x), x))
    with make(module) as pipe:
        pipe.forward_backward(x, target=x, loss_fn=mse, schedule=schedule)
    assert len(seen) == 1
    same(seen[0].cpu(), list(plain.parameters())[2].grad)
    same(on_cpu(module), grads_of(plain))
