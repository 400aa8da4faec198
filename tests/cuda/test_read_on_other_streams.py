"""Tests that a pipe's results may be read on any of the caller's streams, and dropped.

Outputs and gradients may be in memory of a copy stream, which the caller does not know. The caller
follows torch's rule for reading on another stream than that of the call: that stream waits, and is
waited for before going on. Simulated GPUs report memory reused too early, which
fails the test; the same with the plain module is not reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from tests.layers import Apply

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

DEVICES = ["cuda:0", "cuda:1"]


class Hands(nn.Module):
    """A layer that returns its parameter, so that a copied gradient becomes its ``.grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight


@contextlib.contextmanager
def own_streams() -> Iterator[None]:
    """Uses new streams on all devices, which wait for the previous ones, and these for them."""
    new: Any = torch.cuda.Stream
    pairs = [(new(device), torch.cuda.current_stream(device)) for device in DEVICES]
    for own, other in pairs:
        own.wait_stream(other)
    with torch.cuda.stream(pairs[0][0]), torch.cuda.stream(pairs[1][0]):
        yield
    for own, other in pairs:
        other.wait_stream(own)


@pytest.fixture(params=["default", "own"])
def caller(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls the pipe on the default streams or on new ones; other streams read the results."""
    with own_streams() if request.param == "own" else contextlib.nullcontext():
        yield


def read_after_each(layers: list[nn.Module], read: Callable[[Tensor], list[Tensor | None]]) -> None:
    """Takes steps, after each of which a result is read on another stream and dropped."""
    with Pipe(nn.Sequential(*layers), [1, 1], devices=DEVICES) as pipe:
        for _ in range(3):
            y = pipe(torch.ones(4, 3))
            y.sum().backward()
            with own_streams():
                for tensor in read(y):
                    assert tensor is not None
                    tensor.detach().add(1)
            del y, tensor
            pipe.zero_grad()


def test_a_gradient_may_be_dropped_between_forward_and_backward() -> None:
    first = Hands()
    unused = nn.Sequential(Apply(lambda x: x), nn.Identity())
    unused.register_parameter("weight", first.weight)  # it lives on the first device
    second = nn.Sequential(first, Apply(lambda xs: xs[0] * xs[1]), nn.Linear(3, 3))
    with Pipe(nn.Sequential(unused, second), [1, 1], devices=DEVICES) as pipe:
        for _ in range(3):
            y = pipe(torch.ones(4, 3))
            if first.weight.grad is not None:
                with own_streams():
                    first.weight.grad.add(1)
            pipe.zero_grad()
            y.sum().backward()


def test_an_output_that_was_copied_last_may_be_read_and_dropped(caller: None) -> None:
    read_after_each([nn.Linear(3, 3), nn.Identity()], lambda y: [y])


def test_a_gradient_that_was_copied_last_may_be_read_and_dropped(caller: None) -> None:
    first = Hands()
    read_after_each([first, Apply(lambda xs: xs[0] * xs[1])], lambda y: [first.weight.grad])


def test_memory_of_a_stream_that_a_pipe_takes_from_the_pool_for_its_copies() -> None:
    """Torch's pool returns the first stream of a device again as the 33rd."""
    new: Any = torch.cuda.Stream
    with Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=DEVICES) as pipe:
        own = new(DEVICES[1])
        with torch.cuda.stream(own):
            tensor = torch.ones(4, 3, device=DEVICES[1])
        for _ in range(31):
            new(DEVICES[1])
        torch.cuda.current_stream(DEVICES[1]).wait_stream(own)
        tensor.add(1)
        del tensor
        pipe(torch.ones(4, 3))


class Twice(nn.Module):
    """A layer with two uses of its weight, whose gradients autograd adds up out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum() + self.weight.sum()


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(leaf)
        y.backward(dy)
        return leaf.grad, None


class GoesBackwardInside(Twice):
    """A layer whose backward calls ``backward``."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Inner.apply(x, super().forward)  # type: ignore[no-untyped-call]
        return y + self.weight.sum()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("make", [Twice, GoesBackwardInside])
def test_a_step_reads_gradients_in_memory_of_a_stream_that_its_copies_use(
    make: type[Twice],
) -> None:
    """Autograd adds a leaf's gradients on the stream of its first use, if that graph still exists.

    Here it is the third copy stream as well: torch's pool returns it again as the 33rd.
    """
    new: Any = torch.cuda.Stream
    first, x = make(), torch.ones(6, 3, requires_grad=True)
    module = nn.Sequential(first, nn.Linear(3, 3))
    with Pipe(module, [1, 1], devices=DEVICES, chunks=3) as pipe:
        own = new(DEVICES[0])
        own.wait_stream(torch.cuda.current_stream(DEVICES[0]))
        with torch.cuda.stream(own):
            graph = first.weight * 1
        for _ in range(29):
            new(DEVICES[0])
        target = torch.ones(6, 3)
        pipe.forward_backward(x, target=target, loss_fn=nn.functional.mse_loss, schedule="1f1b")
    assert graph.requires_grad
