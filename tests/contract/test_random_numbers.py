"""Tests that a seed fixes the random numbers, whatever the thread timing and the recomputation.

``tests/layers/test_random_numbers.py`` has which layers draw, and from what.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import RecomputationError
from tests.helpers.ways import (
    CALL,
    Way,
    batch,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    take_step,
    ways,
)
from tests.layers import Apply

PATIENCE = 5.0  # s


class Gate(nn.Module):
    """A layer that draws nothing, and in micro-batch ``i`` waits for an event, or for none."""

    def __init__(self, i: int, event: threading.Event | None) -> None:
        super().__init__()
        self.i, self.event = i, event

    def forward(self, x: Tensor) -> Tensor:
        if self.event is not None and number_of(x) == self.i:
            assert self.event.wait(PATIENCE)
        return x * 1


class Drawing(nn.Module):
    """A layer that draws, and says so in micro-batch ``i``."""

    def __init__(self, i: int, drawn: threading.Event) -> None:
        super().__init__()
        self.i, self.drawn = i, drawn
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x[:, :1], (x * self.weight * torch.rand_like(x))[:, 1:]], 1)
        if number_of(x) == self.i:
            self.drawn.set()
        return y


def number_of(x: Tensor) -> int:
    return int(x[0, 0].detach().item())


@pytest.mark.layered  # in any model that draws on the CPU all partitions take turns
@each_way
def test_random_numbers_do_not_depend_on_the_order_in_which_threads_draw(way: Way) -> None:
    def gradients(first: str) -> Any:
        """``F[2,1]`` and ``F[1,3]`` draw in a given order."""
        events = {"F[2,1]": threading.Event(), "F[1,3]": threading.Event()}
        module = nn.Sequential(
            Gate(2, events["F[1,3]"] if first == "F[1,3]" else None),
            Drawing(2, events["F[2,1]"]),
            Gate(1, events["F[2,1]"] if first == "F[2,1]" else None),
            Drawing(1, events["F[1,3]"]),
        )
        rows = torch.arange(4.0, dtype=torch.float64).view(4, 1).expand(4, 8)
        torch.manual_seed(7)
        with piped(module, [1, 1, 1, 1], way, chunks=4) as pipe:
            found = take_step(pipe, way, rows, return_outputs=True)
        return found, grads_of(module)

    same(gradients("F[2,1]"), gradients("F[1,3]"), rtol=0, atol=0)


def dropping() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        linear(3, 8), nn.Dropout(0.5), linear(8, 8), nn.Dropout(0.5), linear(8, 2)
    )


@ways
def test_dropout_is_that_of_a_forward_and_a_backward_from_the_same_seed(way: Way) -> None:
    x, losses, grads = batch(8), [], []
    for in_one in (True, False):
        module = dropping()
        with piped(module, [2, 3], way, chunks=4) as pipe:
            torch.manual_seed(5)
            if in_one:
                loss = pipe.forward_backward(x, loss_fn=mean, schedule=way.schedule)
            else:
                loss = mean(pipe(x), None)
                loss.backward()
        losses.append(loss.detach())
        grads.append(grads_of(module))
    same(*losses)
    same(*grads)


@each_way
def test_a_seed_gives_the_same_bits_again_and_another_seed_others(way: Way) -> None:
    def gradients(seed: int) -> Any:
        module = dropping()
        torch.manual_seed(4)
        x = batch(8)
        with piped(module, [2, 3], way, chunks=4) as pipe:
            torch.manual_seed(seed)
            take_step(pipe, way, x)
        return grads_of(module)

    same(gradients(5), gradients(5), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        same(gradients(5), gradients(6))


class Noisy(nn.Module):
    """A loss that draws."""

    def forward(self, y: Tensor, target: Any) -> Tensor:
        return nn.functional.dropout(y, 0.5).square().mean()


def random_weights(y: Tensor, target: Any) -> Tensor:
    return (y * torch.rand(2)).mean()


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("kind", ["module", "method", "function"])
def test_a_loss_that_draws_draws_the_same_from_a_seed(kind: str, way: Way) -> None:
    loss: Any = {"module": Noisy(), "method": Noisy().forward, "function": random_weights}[kind]

    def outcome(balance: list[int]) -> Any:
        module = dropping()
        torch.manual_seed(4)
        x = batch(8)
        with piped(module, balance, way, chunks=4) as pipe:
            torch.manual_seed(5)
            found = pipe.forward_backward(x, loss_fn=loss, schedule=way.schedule)
        return found, grads_of(module)

    same(outcome([2, 3]), outcome([2, 3]), rtol=0, atol=0)


@pytest.mark.layered  # likewise
@ways
def test_random_numbers_of_a_loss_do_not_depend_on_thread_timing(way: Way) -> None:
    def outcome(is_last: bool) -> Any:
        """The loss of micro-batch 1 draws after ``F[2,1]``, or before it."""
        of_layer, of_loss = threading.Event(), threading.Event()

        def loss(y: Tensor, number: Tensor) -> Tensor:
            found = (y * torch.rand_like(y)).mean()
            if number[0] == 1:
                of_loss.set()
            return found

        rows = torch.arange(4.0, dtype=torch.float64)
        module = nn.Sequential(
            Gate(2, None if is_last else of_loss), Drawing(2, of_layer),
            Gate(1, of_layer if is_last else None), linear(8, 8),
        )  # fmt: skip
        torch.manual_seed(7)
        with piped(module, [1, 1, 1, 1], way, chunks=4) as pipe:
            found = pipe.forward_backward(
                rows.view(4, 1).expand(4, 8), target=rows, loss_fn=loss, schedule=way.schedule
            )
        return found, grads_of(module)

    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = outcome(True)
    torch.set_rng_state(state)
    same(first, outcome(False), rtol=0, atol=0)


def test_a_loss_draws_other_numbers_than_the_layers() -> None:
    drawn = []

    def draw(y: Tensor, target: Any = None) -> Tensor:
        drawn.append(torch.rand(1).item())
        return y.mean()

    module = nn.Sequential(linear(3, 3), Apply(draw))
    with piped(module, [2], Way("1f1b", "never"), chunks=4) as pipe:
        pipe.forward_backward(batch(8), loss_fn=draw)
    assert len(set(drawn)) == 8


@pytest.mark.parametrize("how", [CALL, "1f1b"])
def test_a_step_without_random_numbers_leaves_the_generator_alone(how: str) -> None:
    before = torch.get_rng_state()
    x, way = torch.ones(8, 3, dtype=torch.float64), Way(how, "never")
    module = nn.Sequential(*[Apply(torch.sin), Weight(), Apply(torch.tanh)])
    with piped(module, [2, 1], way, chunks=4) as pipe:
        take_step(pipe, way, x)
    assert torch.equal(torch.get_rng_state(), before)


class Weight(nn.Module):
    """A layer that multiplies by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


# Generators that are not torch's, and those of a layer -------------------------------------------

Draw = Callable[[], float]


def python() -> Draw:
    random.seed(0)
    return random.random


def numpy() -> Draw:
    found = pytest.importorskip("numpy").random
    found.seed(0)
    return found.rand  # type: ignore[no-any-return]


def one_generator() -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda: float(torch.rand((), generator=generator))


DRAWS = {"random": python, "numpy.random": numpy, "torch.Generator": one_generator}


@pytest.mark.parametrize("made", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("schedule", [CALL, "1f1b"])
def test_a_recomputation_that_reads_a_state_further_on_is_refused(
    schedule: str, made: Callable[[], Draw]
) -> None:
    draw, way = made(), Way(schedule, "always")
    with piped(nn.Sequential(Apply(lambda x: x * draw())), [1], way, chunks=2) as pipe:
        x = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(RecomputationError, match="returned other values"):
            take_step(pipe, way, x, loss_fn=lambda y, _: y.sum())
