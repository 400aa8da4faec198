"""Layers that save, set and restore the state of the default generator see that of their task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.pipes import pipe_of_layers
from tests.layers import Apply

Function = Callable[[Tensor], Tensor]
MODES = ["always", "except_last", "never"]


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True)


@contextlib.contextmanager
def set_and_put_back(state: Tensor) -> Iterator[None]:
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    yield
    torch.set_rng_state(now)


@contextlib.contextmanager
def forked(state: Tensor) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


class Repeated(torch.autograd.Function):
    """A checkpoint as many libraries have one: it restores the state of its forward."""

    @staticmethod
    def forward(ctx: Any, restored: Any, x: Tensor) -> Tensor:
        ctx.restored, ctx.state = restored, torch.get_rng_state()
        ctx.save_for_backward(x)
        return drop(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with ctx.restored(ctx.state), torch.enable_grad():
            y = drop(x)
        return None, *torch.autograd.grad(y, x, dy)


class Seeded(torch.autograd.Function):
    """A function that seeds its forward and its backward by a number that it draws, as Reformer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.seed = int(torch.randint(1 << 30, ()))
        torch.manual_seed(ctx.seed)
        return drop(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(ctx.seed)
            return dy * drop(torch.ones_like(dy))


def apply(function: Any, *args: Any) -> Function:
    return lambda x: function.apply(*args, x)


WAYS: dict[str, Function] = {
    "set_rng_state": apply(Repeated, set_and_put_back),
    "fork_rng": apply(Repeated, forked),
    "manual_seed": apply(Seeded),
    "checkpoint": lambda x: checkpoint(drop, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(drop, x, use_reentrant=True),
}
NOT_REENTRANT = [way for way in WAYS if way != "reentrant checkpoint"]


def state() -> bytes:
    return bytes(torch.get_rng_state().tolist())


@pytest.fixture(scope="module")
def one_draw() -> bytes:
    torch.manual_seed(0)
    with pipe_of_layers(nn.Dropout(), chunks=1) as pipe:
        pipe(torch.ones(4, 4))
    return state()


def outcome_of_call(mode: str, *layers: nn.Module) -> tuple[Tensor, Any, bytes]:
    x = torch.ones(4, 64, requires_grad=True)
    torch.manual_seed(0)
    with pipe_of_layers(*layers, chunks=2, checkpoint=mode) as pipe:
        y = pipe(x)
        y.sum().backward()
    return y, x.grad, state()


def outcome_of_step(mode: str, schedule: str, *layers: nn.Module) -> tuple[Tensor, Any, bytes]:
    x = torch.ones(4, 64, requires_grad=True)
    torch.manual_seed(0)
    with pipe_of_layers(*layers, chunks=2, checkpoint=mode) as pipe:
        _, y = pipe.forward_backward(
            x, loss_fn=lambda y, _: y.sum(), schedule=schedule, reduction="sum",
            return_outputs=True,
        )  # fmt: skip
    return y, x.grad, state()


def check(first: tuple[Tensor, Any, bytes], again: tuple[Tensor, Any, bytes], after: bytes) -> None:
    y, gradient, found = first
    assert torch.equal(gradient, y) and len(set(y.flatten().tolist())) > 1
    assert found == after
    assert torch.equal(again[0], y) and torch.equal(again[1], gradient)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_in_a_call_their_gradient_is_that_of_their_forward(
    way: str, mode: str, one_draw: bytes
) -> None:
    layers = nn.Dropout(), Apply(WAYS[way]), nn.Dropout()
    check(outcome_of_call(mode, *layers), outcome_of_call(mode, *layers), one_draw)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("way", NOT_REENTRANT)
def test_in_a_step_their_gradient_is_that_of_their_forward(
    way: str, mode: str, schedule: str, one_draw: bytes
) -> None:
    layers = nn.Dropout(), Apply(WAYS[way]), nn.Dropout()
    found = [outcome_of_step(mode, schedule, *layers) for _ in range(2)]
    check(found[0], found[1], one_draw)


def test_each_task_that_draws_sees_a_state_of_its_own() -> None:
    seen: list[bytes] = []

    def look(x: Tensor) -> Tensor:
        seen.append(state())
        return drop(x)

    with pipe_of_layers(Apply(look), Apply(look), chunks=2) as pipe:
        pipe(torch.ones(2, 1))
    assert len({state(), *seen}) == 5
