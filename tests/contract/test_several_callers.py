"""Tests concurrent calls and steps, nested pipes and asyncio, while some of them fail."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, ReentrantCallError, is_recomputing
from tests.faults.injector import Custom, Failure
from tests.helpers.activations import Activations
from tests.helpers.caller_threads import Caller
from tests.helpers.failing_steps import acting
from tests.helpers.ways import CALL, MODES, SCHEDULES
from tests.layers import Apply

WAIT = 20.0  # s
HOWS = (CALL, *SCHEDULES)


@pytest.fixture(scope="module", autouse=True)
def _imported(no_gc_in_module: None) -> None:
    """Takes a first step, whose imports no test should pay for."""
    with Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"]) as pipe:
        pipe.forward_backward(torch.ones(1, 1), loss_fn=lambda y, _: y.sum())


Fails = dict[tuple[int, str, int], BaseException]


class Scale(nn.Module):
    """A layer that fails on request; the first column of its rows holds their caller's number."""

    def __init__(self, j: int, fails: Fails) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.6 + 0.2 * j, -1.1]))
        self.j, self.fails, self.seen = j, fails, Activations()

    def at(self, caller: int, phase: str) -> None:
        if (caller, phase, self.j) in self.fails:
            raise self.fails[caller, phase, self.j]

    def forward(self, x: Tensor) -> Tensor:
        caller = int(x.detach()[0, 0].item())
        self.at(caller, "recomputation" if is_recomputing() else "forward")
        y = acting(x[:, 1:] * self.weight, partial(self.at, caller, "backward"))
        return torch.cat([x[:, :1], self.seen.add(y.tanh())], 1)


def loss(y: Tensor, target: Any) -> Tensor:
    return y[:, 1:].square().sum()


def batch(caller: int, rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(caller)
    columns = torch.rand(rows, 2, generator=generator)
    return torch.cat([torch.full((rows, 1), float(caller)), columns], 1)


def act(pipe: Pipe, how: str, caller: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Returns the loss of the caller's batch and its input's gradient, by a call or a step."""
    x = batch(caller, rows).requires_grad_()
    if how == CALL:
        total = loss(pipe(x), None)
        total.backward()  # type: ignore[no-untyped-call]
    else:
        total = pipe.forward_backward(x, loss_fn=loss, reduction="sum", schedule=how)
    assert x.grad is not None
    return total.detach(), x.grad


@pytest.mark.parametrize("seed", range(18))
def test_callers_are_right_while_others_fail(seed: int) -> None:
    draw = random.Random(seed)
    callers, checkpoint = range(6), MODES[seed % 3]
    phases = ["forward", "backward"] + ["recomputation"] * (checkpoint == "always")
    kinds = (Failure, Custom, KeyboardInterrupt, MemoryError, StopIteration)
    failing = set(draw.sample(callers, 2))
    fails: Fails = {
        (caller, draw.choice(phases), draw.randrange(3)): draw.choice(kinds)(caller)
        for caller in failing
    }
    plain = nn.Sequential(*[Scale(j, fails) for j in range(3)])
    hows = [draw.choice(HOWS) for _ in callers]
    rows = [draw.randint(1, 6) for _ in callers]
    with Pipe(plain, [1] * 3, devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            began = [Caller(partial(act, pipe, hows[k], k, rows[k]), WAIT) for k in callers]
            for caller, thread in zip(callers, began, strict=True):
                if caller in failing:
                    with pytest.raises(BaseException) as caught:  # noqa: B017  any of them
                        thread.result()
                    assert caught.value in fails.values() and caught.value.args == (caller,)
                    continue
                total, dx = thread.result()
                x = batch(caller, rows[caller]).requires_grad_()
                expected = loss(plain(x), None)
                (grad,) = torch.autograd.grad(expected, x)
                assert torch.allclose(total, expected.detach(), atol=1e-6)
                assert torch.allclose(dx, grad, atol=1e-6)


def test_the_gradients_of_steps_and_backwards_of_several_callers_add_up() -> None:
    plain = nn.Sequential(*[Scale(j, {}) for j in range(2)])
    with Pipe(plain, [1, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        began = [Caller(partial(act, pipe, HOWS[k % 3], k), WAIT) for k in range(5)]
        for caller in began:
            caller.result()
        found = [parameter.grad for parameter in plain.parameters()]
        plain.zero_grad()
        total = torch.stack([loss(plain(batch(caller)), None) for caller in range(5)]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        for grad, parameter in zip(found, plain.parameters(), strict=True):
            assert grad is not None and parameter.grad is not None
            assert torch.allclose(grad, parameter.grad, atol=1e-5)


# Pipes in pipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("call", ["forward", "step"])
def test_a_layer_that_calls_its_own_pipe_is_refused(phase: str, call: str) -> None:
    def again() -> None:
        x = torch.rand(2, 3)
        with torch.enable_grad():  # a backward is without
            if call == "step":
                pipe.forward_backward(x, loss_fn=lambda y, _: y.sum())
            else:
                pipe(x)

    def function(x: Tensor) -> Tensor:
        if phase == "forward":
            again()
        return acting(x, again)

    with Pipe(nn.Sequential(nn.Linear(3, 3), Apply(function)), [1, 1], devices=["cpu"] * 2) as pipe:
        with pytest.raises(ReentrantCallError, match="would wait for itself"):
            pipe.forward_backward(torch.rand(2, 3), loss_fn=lambda y, _: y.sum())
        assert pipe[0].weight.grad is None


# asyncio ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [CALL, "1f1b"])
def test_tasks_of_asyncio_get_their_own_rows_while_some_of_them_fail(how: str) -> None:
    fails: Fails = {(1, "backward", 0): Failure("1"), (3, "forward", 1): Failure("3")}
    layers = nn.Sequential(*[Scale(j, fails) for j in range(2)])

    async def run(pipe: Pipe) -> list[Any]:
        steps = [asyncio.to_thread(act, pipe, how, caller) for caller in range(5)]
        return await asyncio.wait_for(asyncio.gather(*steps, return_exceptions=True), WAIT)

    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        results = asyncio.run(run(pipe))
    for caller, result in enumerate(results):
        if caller in (1, 3):
            assert isinstance(result, Failure) and str(result) == str(caller)
        else:
            assert torch.allclose(result[0], loss(layers(batch(caller)), None).detach(), atol=1e-6)
