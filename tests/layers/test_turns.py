"""Layers that draw on the CPU take turns; the first micro-batch shows which do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import PipelineTimeout
from pipert.layers.default_generators import default_generator
from pipert.layers.random_numbers import CPU, RunSeed, TaskRng
from pipert.schedules.action import Action
from tests.helpers.pipes import pipe_of_layers
from tests.layers import Apply

PATIENCE = 10.0  # s
LOSS: dict[str, Any] = {"loss_fn": lambda y, _: y.sum(), "reduction": "sum"}


def number_of(x: Tensor) -> int:
    return int(x[0, 0].detach().item())


def numbered(m: int) -> Tensor:
    return torch.arange(float(m)).view(m, 1)


class Inside:
    """Counts the threads that are inside of a layer at once."""

    def __init__(self) -> None:
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def around(self, function: Callable[[Tensor], Tensor]) -> nn.Module:
        def call(x: Tensor) -> Tensor:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
            for _ in range(20):  # so that others would come in
                y = function(x)
            with self._lock:
                self._now -= 1
            return y

        return Apply(call)


@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_layers_that_draw_compute_one_at_a_time(checkpoint: str, schedule: str | None) -> None:
    inside = Inside()
    layers = [inside.around(F.dropout) for _ in range(3)]
    with pipe_of_layers(*layers, chunks=6, checkpoint=checkpoint) as pipe:
        x = torch.ones(6, 4, requires_grad=True)
        if schedule is None:
            pipe(x).sum().backward()
        else:
            pipe.forward_backward(x, schedule=schedule, **LOSS)
    assert inside.most == 1


@pytest.mark.parametrize("is_step", [False, True])
def test_layers_that_do_not_draw_compute_at_the_same_time(is_step: bool) -> None:
    """Beside one that does, too. Only in the first micro-batch do all take turns."""
    both = threading.Barrier(2)

    def meet(i: int) -> Callable[[Tensor], Tensor]:
        def layer(x: Tensor) -> Tensor:
            if number_of(x) == i:
                both.wait(PATIENCE)
            return x * 1

        return layer

    def drop(x: Tensor) -> Tensor:
        return x * torch.rand(()).clamp(1.0)

    layers = Apply(meet(3)), Apply(meet(2)), Apply(drop)
    with pipe_of_layers(*layers, chunks=4, checkpoint="never") as pipe:
        x = numbered(4).requires_grad_()
        if is_step:
            pipe.forward_backward(x, schedule="gpipe", **LOSS)
        else:
            pipe(x)
    assert not both.broken


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_pipe_in_a_layer_that_draws_takes_its_turns_meanwhile(checkpoint: str) -> None:
    inner = pipe_of_layers(nn.Dropout(), nn.Dropout(), chunks=2)
    layer = Apply(lambda x: F.dropout(inner(F.dropout(x))))
    found = []
    with inner, pipe_of_layers(layer, nn.Dropout(), layer, chunks=3, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            x = torch.ones(6, 64, requires_grad=True)
            torch.manual_seed(0)
            y = pipe(x)
            y.sum().backward()
            assert torch.equal(y, x.grad)  # type: ignore[arg-type]
            found.append((y, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_pipe_in_a_layer_that_does_not_draw_leaves_the_generator_alone() -> None:
    inner = pipe_of_layers(Apply(torch.sin), Apply(torch.cos), chunks=2)
    before = torch.get_rng_state()
    with inner, pipe_of_layers(*[Apply(inner) for _ in range(3)], chunks=4) as pipe:
        for _ in range(3):
            pipe(torch.ones(8, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_of_several_threads_have_gradients_that_are_right() -> None:
    right: list[bool] = []

    def train() -> None:
        layers = nn.Dropout(), Apply(torch.neg), Apply(F.dropout)
        with pipe_of_layers(*layers, chunks=3, checkpoint="always") as pipe:
            for _ in range(10):
                x = torch.ones(6, 32, requires_grad=True)
                y = pipe(x)
                y.sum().backward()
                right.append(torch.equal(y, x.grad))  # type: ignore[arg-type]

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert right == [True] * 30


def test_a_layer_that_raises_gives_the_generator_back() -> None:
    def fail(x: Tensor) -> Tensor:
        torch.rand(3)
        raise ValueError("no")

    before = torch.get_rng_state()
    with pipe_of_layers(Apply(fail), Apply(F.dropout), chunks=2) as pipe:
        with pytest.raises(ValueError, match="no"):
            pipe(torch.ones(2, 2))
        assert not default_generator(CPU)._uses
    torch.set_rng_state(before)


def test_a_fork_that_meets_another_s_turn_leaves_the_state_of_no_task() -> None:
    inside, has_saved = threading.Event(), threading.Event()

    def fork(x: Tensor) -> Tensor:  # in the last micro-batch, while the other partition draws
        if number_of(x) == 2:
            assert inside.wait(PATIENCE)
            with torch.random.fork_rng(devices=[]):
                has_saved.set()
                while torch.initial_seed() != 7:
                    threading.Event().wait(0.001)
        return x * 1

    def draw(x: Tensor) -> Tensor:
        torch.rand(())
        if number_of(x) == 1:
            inside.set()
            assert has_saved.wait(PATIENCE)
        return x * 1

    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    with pipe_of_layers(Apply(fork), Apply(draw), chunks=3, checkpoint="never") as pipe:
        pipe(numbered(3))
        assert torch.equal(torch.get_rng_state(), after)


def test_a_run_that_was_given_up_holds_up_no_other() -> None:
    """Its layer is stuck, and has the generator, as all have in the first micro-batch."""
    release = threading.Event()

    def wait(x: Tensor) -> Tensor:
        assert release.wait(PATIENCE)
        return F.dropout(x)

    before = torch.get_rng_state()
    with pipe_of_layers(Apply(wait), chunks=1) as stuck, pipe_of_layers(nn.Dropout()) as pipe:
        with pytest.raises(PipelineTimeout):
            stuck(torch.ones(2, 2), timeout=0.2)
        torch.set_rng_state(before)
        x = torch.ones(2, 64, requires_grad=True)
        y = pipe(x)
        y.sum().backward()
        assert torch.equal(y, x.grad)  # type: ignore[arg-type]
        release.set()


def test_whoever_waits_for_a_turn_may_give_up() -> None:
    release, entered = threading.Event(), threading.Event()

    def wait(x: Tensor) -> Tensor:
        entered.set()
        assert release.wait(PATIENCE)
        return F.dropout(x)

    with pipe_of_layers(Apply(wait), chunks=1) as first, pipe_of_layers(nn.Dropout()) as pipe:
        caller = threading.Thread(target=first, args=(torch.ones(2, 2),))
        caller.start()
        assert entered.wait(PATIENCE)
        with pytest.raises(PipelineTimeout):
            pipe(torch.ones(2, 2), timeout=0.2)
        release.set()
        caller.join(PATIENCE)


def test_runs_that_overlap_learn_from_each_other_which_layers_draw() -> None:
    """Two items of ``map`` are in layers at once, though each is the first of its run."""
    both = threading.Barrier(2)

    def meet(i: int) -> Callable[[Tensor], Tensor]:
        def layer(x: Tensor) -> Tensor:
            if number_of(x) == i:
                both.wait(PATIENCE)
            return x

        return layer

    with torch.no_grad(), pipe_of_layers(Apply(meet(3)), Apply(meet(2)), chunks=1) as pipe:
        list(pipe.map([*numbered(5)[:, None]]))
    assert not both.broken


def test_a_task_whose_run_was_given_up_does_not_begin_when_its_turn_comes() -> None:
    first, second = RunSeed(), RunSeed()
    for run in (first, second):
        run.draw()
    ran, waits = list[str](), threading.Event()

    def wait_in_vain() -> None:
        with pytest.raises(RuntimeError, match="given up"):
            waits.set()
            with TaskRng(second, Action("F", 0, 0), CPU):
                ran.append("second")

    with TaskRng(first, Action("F", 0, 0), CPU):
        thread = threading.Thread(target=wait_in_vain)
        thread.start()
        assert waits.wait(PATIENCE)
        second.is_over = True
    thread.join(PATIENCE)
    assert not thread.is_alive() and ran == []
