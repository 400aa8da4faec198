"""Tests that a worker computes on its caller's streams, and gets its own back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.workers.context import CallerContext
from tests.cuda.streams import own_streams

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

OUTSIDE = "cuda:1"  # of the pipe: not each call says what is the stream there


def without_grad(pipe: Pipe, x: Tensor) -> None:
    with torch.no_grad():
        pipe(x)


def in_graph(pipe: Pipe, x: Tensor) -> None:
    pipe(x.requires_grad_()).sum().backward()


def step(pipe: Pipe, x: Tensor) -> None:
    pipe.forward_backward(x, loss_fn=lambda y, _: y.sum())


@pytest.mark.parametrize("use", [without_grad, in_graph, step])
def test_arguments_are_awaited_on_the_stream_of_their_own_call(
    use: Callable[[Pipe, Tensor], None]
) -> None:
    """Not on the stream of an earlier call."""
    with Pipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=["cuda:0"]) as pipe:
        with own_streams(OUTSIDE):
            use(pipe, torch.randn(8, 4, device="cuda:0"))  # no copy stream of the other yet
        use(pipe, torch.randn(8, 4, device=OUTSIDE).mul(2))


class LeavesAStreamOn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        own: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        own.wait_stream(torch.cuda.current_stream())
        x.record_stream(own)
        torch.cuda.set_stream(own)
        return x * 2


def test_a_stream_that_a_layer_leaves_on_is_put_back_after_its_task() -> None:
    module = nn.Sequential(LeavesAStreamOn(), nn.Identity())
    with Pipe(module, [1, 1], devices=["cuda:0", "cuda:1"], chunks=2) as pipe, torch.no_grad():
        for _ in range(2):
            pipe(torch.randn(8, 4, device="cuda:0").mul(2))


def test_a_worker_gets_its_own_streams_back() -> None:
    new: Any = torch.cuda.Stream
    before, callers = new("cuda:0"), new("cuda:0")
    with torch.cuda.stream(callers):
        context = CallerContext([torch.device("cuda:0")])
    with torch.cuda.stream(before):
        for block in (context.on_worker, context.going_back_on_worker):
            with block:
                assert torch.cuda.current_stream() == callers
            assert torch.cuda.current_stream() == before
