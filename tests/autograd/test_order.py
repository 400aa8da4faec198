"""Tests that Fork and Join order a backward, alone and inside a pipe."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from pipert._torch import node_count
from pipert.autograd import order
from pipert.autograd.order import begin_numbers, edge_of, enter
from tests.helpers.caller_threads import Caller

MODES = ["always", "except_last", "never"]


class _Note(torch.autograd.Function):
    """The identity, whose backward leaves a note."""

    @staticmethod
    def forward(ctx: Any, log: list[Any], note: Any, x: Tensor) -> Tensor:
        ctx.log, ctx.note = log, note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        ctx.log.append(ctx.note)
        return None, None, grad


def noted(log: list[Any], note: Any, x: Tensor) -> Tensor:
    result: Tensor = _Note.apply(log, note, x)  # type: ignore[no-untyped-call]
    return result


def backward(*tensors: Tensor) -> None:
    torch.autograd.backward(tensors)


def leaf() -> Tensor:
    return torch.ones((), requires_grad=True)


def fork(ys: tuple[Tensor, ...], token: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
    token, *rest = order.fork(None, token, *ys)
    assert token is not None
    return tuple(rest), token


def join(xs: tuple[Tensor, ...], token: Tensor) -> tuple[Tensor, ...]:
    joined: tuple[Tensor, ...] = order.join(token, *xs)
    return joined


# The order of two. Of the nodes that are ready autograd takes the one with the highest number, and
# each thread counts its own; so a thread that has counted far makes nodes that come first.

T = TypeVar("T")


def on_new_thread(function: Callable[[], T], nodes_before: int) -> T:
    """Calls ``function`` on a thread that has made ``nodes_before`` nodes."""
    results: list[T] = []

    def target() -> None:
        x = leaf()
        for _ in range(nodes_before):
            x = x * 1
        results.append(function())

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return results[0]


def test_join_makes_the_backward_of_the_forked_value_wait() -> None:
    log: list[Any] = []
    (first,), token = on_new_thread(lambda: fork((noted(log, 0, leaf()),)), nodes_before=100)
    second = on_new_thread(lambda: noted(log, 1, join((leaf() * 1,), token)[0]), nodes_before=0)
    backward(first, second)
    assert log == [1, 0]


def test_token_that_is_handed_from_fork_to_fork_orders_as_well() -> None:
    log: list[Any] = []
    outputs, token = [], None
    for i in range(5):
        (y,), token = fork((noted(log, i, leaf()),), token)
        outputs.append(y)
    backward(*outputs)
    assert log == [4, 3, 2, 1, 0]


# The order of a pipe's tasks.


class Step(NamedTuple):
    """The ``F``, ``R`` or ``B`` of micro-batch ``i`` on partition ``j``."""

    kind: str
    i: int
    j: int


class Recorder(nn.Module):
    """A layer that writes down when it is computed, recomputed and differentiated.

    The rows of micro-batch ``i`` are full of ``i``; that is how it knows.
    """

    def __init__(self, log: list[Step], j: int) -> None:
        super().__init__()
        self.log = log
        self.j = j
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        i = int(x[0, 0])
        self.log.append(Step("R" if is_recomputing() else "F", i, self.j))
        return noted(self.log, Step("B", i, self.j), x * self.weight)


def run(n: int, m: int, checkpoint: str, differentiable: bool) -> list[Step]:
    """Takes a training step of ``n`` recorders on ``m`` micro-batches of two rows."""
    log: list[Step] = []
    module = nn.Sequential(*[Recorder(log, j) for j in range(n)])
    x = torch.arange(float(m)).repeat_interleave(2).unsqueeze(1).repeat(1, 2)
    with Pipe(module, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint) as pipe:
        pipe(x.requires_grad_(differentiable)).sum().backward()
    return log


def backwards(log: list[Step], j: int) -> list[int]:
    return [step.i for step in log if step.kind == "B" and step.j == j]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_backward_runs_in_reverse_order_with_differentiable_input(n: int, checkpoint: str) -> None:
    log = run(n, 5, checkpoint, differentiable=True)
    assert [backwards(log, j) for j in range(n)] == [[4, 3, 2, 1, 0]] * n


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_backward_runs_in_reverse_order_without_differentiable_input(
    n: int, checkpoint: str
) -> None:
    log = run(n, 5, checkpoint, differentiable=False)
    assert [backwards(log, j) for j in range(n)] == [[4, 3, 2, 1, 0]] * n


class Branches(nn.Module):
    """Has long ways from its weight, beside the one from the input."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.weight
        for _ in range(8):
            scale = scale.sin() + scale
        return x * scale.tanh()


@pytest.mark.parametrize("checkpoint", MODES)
def test_gradients_of_a_tied_weight_are_summed_in_the_first_call_as_in_later_ones(
    checkpoint: str
) -> None:
    """Although the nodes of a new worker have the lowest numbers."""
    for _ in range(10):
        weight, x = nn.Parameter(torch.randn(64)), torch.randn(8, 64)
        module, gradients = nn.Sequential(*[Branches(weight) for _ in range(3)]), list[Any]()
        with Pipe(module, [1] * 3, devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint) as pipe:
            for _ in range(2):
                weight.grad = None
                pipe(x).square().sum().backward()
                gradients.append(weight.grad)
        assert torch.equal(*gradients)


@pytest.mark.parametrize("checkpoint", MODES)
def test_backward_runs_in_reverse_order_behind_frozen_partitions(checkpoint: str) -> None:
    log: list[Step] = []
    module = nn.Sequential(*[Recorder(log, j) for j in range(3)])
    module[0].requires_grad_(False)
    x = torch.arange(5.0).unsqueeze(1).repeat(1, 2)
    with Pipe(module, [1, 1, 1], devices=["cpu"] * 3, chunks=5, checkpoint=checkpoint) as pipe:
        pipe(x).sum().backward()
    assert [backwards(log, j) for j in range(3)] == [[], [4, 3, 2, 1, 0], [4, 3, 2, 1, 0]]


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_recomputation_runs_just_before_its_backward(n: int, differentiable: bool) -> None:
    log = run(n, 5, "always", differentiable)
    for j in range(n):
        steps = [(step.kind, step.i) for step in log if step.j == j and step.kind != "F"]
        assert steps == [(kind, i) for i in (4, 3, 2, 1, 0) for kind in "RB"]


@pytest.mark.parametrize("checkpoint", MODES)
def test_each_partition_is_computed_in_order(checkpoint: str) -> None:
    log = run(3, 5, checkpoint, differentiable=False)
    for j in range(3):
        assert [s.i for s in log if s.kind == "F" and s.j == j] == [0, 1, 2, 3, 4]


def test_an_edge_keeps_its_place_in_the_graph_and_not_the_value() -> None:
    (x,) = enter((torch.ones(2, 2, requires_grad=True).clone(),))
    given, edge, value = x.detach(), edge_of(x), weakref.ref(x)
    del x
    assert value() is None
    (found,) = torch.autograd.grad([edge], [edge], [given])
    assert found is not None


# Turns.


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_numbers_of_turns_are_left_under_any_mode(mode: Callable[[], Any]) -> None:
    def first_nodes() -> tuple[int, int]:
        with mode():
            begin_numbers(7)
            before = node_count()
            begin_numbers(7)  # which there are
        return before, node_count()

    assert Caller(first_nodes).result() == (7, 7)  # a new thread counts from 0


def test_a_thread_far_behind_the_caller_catches_up_at_once() -> None:
    """Otherwise its first tasks could not tell their nodes from the caller's."""
    assert Caller(lambda: begin_numbers(1_001_000)).result() == 1_001_000
