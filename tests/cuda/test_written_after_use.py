"""Tests that the caller may overwrite arguments as soon as the call is over.

Copy streams may read them after the call has returned, so the caller's stream must
wait for that, whether the call succeeded or not. The plain module reads on the caller's stream and
has nothing to wait for. Simulated GPUs report a missing wait, which fails the test; on real
ones values would be wrong now and then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe
from tests.cuda.streams import own_streams, sleep
from tests.pipe.test_tied import language_model

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

HERE, ELSEWHERE = "cuda:0", "cuda:1"
SPILLED = 1e6


class Fails(nn.Module):
    """A layer that raises in micro-batch 2 of four."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("no third one")
        return x


class AddMask(nn.Module):
    """A layer with two values at its boundary that returns the second one unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = values
        return self.linear(x) + mask, mask


class Add(nn.Module):
    """A sum, whose gradient goes unchanged to both summands."""

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1]


def make(devices: list[str], *more: nn.Module, **options: Any) -> Pipe:
    """Makes a linear layer for each device; ``more`` is on the last one."""
    layers = [nn.Linear(4, 4) for _ in devices]
    balance = [1] * (len(devices) - 1) + [1 + len(more)]
    return Pipe(nn.Sequential(*layers, *more), balance, devices=devices, chunks=4, **options)


def late(device: str, requires_grad: bool = False) -> Tensor:
    """Makes rows that the device writes only after some other work."""
    with torch.cuda.device(device):
        sleep()
    return torch.ones(8, 4, device=device, requires_grad=requires_grad)


@contextlib.contextmanager
def unharmed(pipe: Pipe, *args: Any) -> Iterator[list[Tensor]]:
    """Compares the output that the block appends with the pipe's output for unchanged arguments."""
    with torch.no_grad():
        expected = pipe(*args).clone()
    found: list[Tensor] = []
    yield found
    torch.testing.assert_close(found[0], expected)


placements = pytest.mark.parametrize(
    "devices",
    [["cuda:0", "cuda:1"], ["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cuda:1", "cuda:0"]],
    ids=",".join,
)
streams = pytest.mark.parametrize("own_stream", [False, True], ids=["default", "own"])


def stream_of_the_caller(own: bool) -> AbstractContextManager[Any]:
    return own_streams(HERE, ELSEWHERE) if own else contextlib.nullcontext()


@placements
@streams
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_an_input_may_be_refilled_after_a_call(
    devices: list[str], own_stream: bool, grad: bool
) -> None:
    with make(devices) as pipe, stream_of_the_caller(own_stream):
        x = late(ELSEWHERE)
        with unharmed(pipe, x) as found, torch.set_grad_enabled(grad):
            found.append(pipe(x))
            x.fill_(SPILLED)


@placements
def test_an_input_may_be_refilled_after_its_backward(devices: list[str]) -> None:
    with make(devices) as pipe:
        x = late(ELSEWHERE, requires_grad=True)
        pipe(x).sum().backward()
        assert x.grad is not None
        grad = x.grad.clone()
        with torch.no_grad():
            x.grad.fill_(SPILLED)
            x.fill_(1)
        x.grad = None
        pipe(x).sum().backward()
        torch.testing.assert_close(x.grad, grad)


@placements
@streams
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_arguments_and_targets_may_be_refilled_after_a_step(
    devices: list[str], own_stream: bool, schedule: str
) -> None:
    with make(devices) as pipe, stream_of_the_caller(own_stream):
        x, target = late(HERE), late(ELSEWHERE)
        losses = []
        for _ in range(2):
            losses.append(
                pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, schedule=schedule)
            )
            x.fill_(SPILLED).fill_(1)
            target.fill_(SPILLED).fill_(1)
        torch.testing.assert_close(losses[1], losses[0])


@placements
def test_a_gradient_of_an_argument_may_be_refilled_after_a_step(devices: list[str]) -> None:
    with make(devices) as pipe:
        x = late(ELSEWHERE, requires_grad=True)
        grads = []
        for _ in range(2):
            pipe.forward_backward(x, target=late(ELSEWHERE), loss_fn=F.mse_loss)
            assert x.grad is not None
            grads.append(x.grad.clone())
            x.grad.fill_(SPILLED)
            x.grad = None
        torch.testing.assert_close(grads[1], grads[0])


@streams
def test_an_input_that_the_first_partition_returns_unchanged_may_be_refilled(
    own_stream: bool
) -> None:
    module = nn.Sequential(AddMask(), AddMask(), Add())
    with Pipe(module, [1, 2], devices=[HERE, ELSEWHERE], chunks=4) as pipe:
        with stream_of_the_caller(own_stream):
            x, mask = late(HERE), late(HERE)
            with unharmed(pipe, (x, mask)) as found:
                found.append(pipe((x, mask)))
                mask.fill_(SPILLED)


def test_a_gradient_that_the_last_partition_returns_unchanged_may_be_refilled() -> None:
    module = nn.Sequential(AddMask(), Add())
    with Pipe(module, [1, 1], devices=[HERE, ELSEWHERE], chunks=4) as pipe:
        x, mask, dy = late(HERE), late(HERE).requires_grad_(), late(ELSEWHERE)
        pipe((x, mask)).backward(dy)
        dy.fill_(SPILLED)
        assert mask.grad is not None
        torch.testing.assert_close(mask.grad, torch.full_like(mask, 2))


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]])
def test_an_optimizer_may_step_after_an_evaluation_of_tied_weights(devices: list[str]) -> None:
    tokens = torch.arange(24).reshape(8, 3) % 7
    with Pipe(language_model(), [2, 2], devices=devices, chunks=4) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=SPILLED)
        pipe(tokens).sum().backward()
        with torch.no_grad():
            expected = pipe(tokens).clone()
            found = pipe(tokens)
        optimizer.step()
        torch.testing.assert_close(found, expected)


def run_a_call(pipe: Pipe, x: Tensor) -> None:
    pipe(x)


def run_a_step(pipe: Pipe, x: Tensor) -> None:
    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)


@placements
@pytest.mark.parametrize("run", [run_a_call, run_a_step])
def test_an_input_may_be_refilled_after_a_call_that_failed(
    devices: list[str], run: Callable[[Pipe, Tensor], None]
) -> None:
    with make(devices, Fails()) as pipe:
        x = late(ELSEWHERE)
        with pytest.raises(ArithmeticError):
            run(pipe, x)
        x.fill_(SPILLED)
        torch.testing.assert_close(pipe(x), pipe(x))
