"""The life of a skip, event by event. The collector of cycles is off.

1. a layer stashes it
2. its task is over: it is on its way
3. a partition in between runs
4. the task of the layer that pops it has begun
5. it has been popped
6. the forward is over
7. the backward is over

Counted is data, not tensor objects: the skip itself, and the copy of it that a checkpointed task
works on. Stages are driven by hand where workers would still have their last task at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from pipert.autograd.streams import CopyStreams
from pipert.layers.random_numbers import RunSeed
from pipert.observe.run_trace import Trace
from pipert.schedules.action import Action
from pipert.schedules.plan import plan_call
from pipert.skip import Skippable, pop, stash
from pipert.skip.declarations import keys_of
from pipert.stage.assembly import Layered, assemble
from pipert.stage.run import Run
from pipert.stage.stage import Task
from pipert.workers.context import CallerContext
from tests.helpers.activations import Activations
from tests.helpers.skip_layers import declaring

pytestmark = pytest.mark.usefixtures("no_gc_in_module")

Forward = Generator[Any, Any, Any]

MODES = ["always", "except_last", "never"]
modes = pytest.mark.parametrize("checkpoint", MODES)


class Stash(Skippable):
    def __init__(self, skips: Activations, log: Callable[[str], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.skips = skips
        self.log = log

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", self.skips.add(x + self.weight))  # addition saves nothing
        self.log("1 stashed")
        return x * self.weight


class Pop(Skippable):
    def __init__(self, popped: Activations, log: Callable[[str], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.popped = popped
        self.log = log

    def forward(self, x: Tensor) -> Forward:
        self.log("4 begun")
        x = x + self.popped.add((yield pop("a")))
        self.log("5 popped")
        return x * self.weight


class Log(nn.Module):
    def __init__(self, log: Callable[[str], None], event: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.log = log
        self.event = event

    def forward(self, x: Tensor) -> Tensor:
        self.log(self.event)
        return x * self.weight


class Setting:
    """Layers with a skip from the first to the last; what is there of it at each event."""

    def __init__(self, fail: bool = False) -> None:
        self.skips, self.popped = Activations(), Activations()
        self.counts: dict[str, int] = {}
        self.fail = fail
        stasher = declaring(Stash, stash=["a"])(self.skips, self.log)
        popper = declaring(Pop, pop=["a"])(self.popped, self.log)
        self.layers = [stasher, Log(self.log, "3 in between"), popper]

    def log(self, event: str) -> None:
        if self.fail and event.startswith("3"):
            raise ValueError("the layer in between")
        if is_recomputing():
            event = event.replace(" ", " again ", 1)
        self.counts[event] = self.skips.now()

    def pipe(self, balance: list[int], **options: Any) -> Pipe:
        model = nn.Sequential(*self.layers)
        return Pipe(model, balance, devices=["cpu"] * len(balance), **options)

    def left(self) -> int:
        return self.skips.settled(0) + self.popped.settled(0)


def drive(setting: Setting, recomputed: int) -> Tensor:
    """F[0,0] to F[0,n-1], a layer each, on this thread."""
    n = len(setting.layers)
    plan, layers = plan_call(1, n, range(n), recomputed), tuple(map(nn.Sequential, setting.layers))
    with Trace().open(plan) as trace:
        devices = n * [torch.device("cpu")]
        run = Run(plan, devices, CallerContext(), CopyStreams(), trace, RunSeed())
        model = Layered(layers, tuple(map(keys_of, layers)))
        stages = assemble(run, model, [torch.ones(1, 3)], None, None)
        for j in range(n):
            task = Task(stages[j], Action("F", 0, j))
            task.send(task.execute(task.receive()))
            del task
            if j == 0:
                setting.log("2 task over")
        assert run.outcome.take_error() is None
        y: Tensor = run.outputs[0]
        del run, stages, model, trace
    setting.log("6 forward over")
    return y


FORWARD = {"1 stashed": 1, "2 task over": 1, "3 in between": 1, "4 begun": 1, "5 popped": 1}


# Event by event -----------------------------------------------------------------------------------


def test_a_skip_without_checkpointing_is_gone_after_the_forward() -> None:
    setting = Setting()
    y = drive(setting, recomputed=0)
    assert setting.counts == {**FORWARD, "6 forward over": 0}
    torch.autograd.backward(y.sum())
    assert setting.left() == 0


def test_a_skip_with_checkpointing_is_kept_for_the_recomputation_of_the_popping_layer() -> None:
    setting = Setting()
    y = drive(setting, recomputed=1)
    assert setting.counts == {**FORWARD, "6 forward over": 1}
    setting.counts.clear()
    torch.autograd.backward(y.sum())
    assert setting.counts == {
        "4 again begun": 1,
        "5 again popped": 1,
        "3 again in between": 0,
        "1 again stashed": 1,  # another skip, for nobody
    }
    assert setting.left() == 0


def test_within_a_partition_a_skip_is_gone_when_the_layer_that_popped_it_is_done() -> None:
    setting = Setting()
    after = Log(setting.log, "the next layer")
    with torch.no_grad(), Pipe(
        nn.Sequential(*setting.layers, after), [4], devices=["cpu"]
    ) as pipe:
        pipe(torch.ones(1, 3))
    assert (setting.counts["5 popped"], setting.counts["the next layer"]) == (1, 0)


# What is left -------------------------------------------------------------------------------------

BALANCES = [[3], [1, 1, 1], [2, 1], [1, 2]]
balances = pytest.mark.parametrize("balance", BALANCES, ids=str)


@modes
@balances
def test_after_a_step_no_skip_is_left_though_the_output_is_kept(
    checkpoint: str, balance: list[int]
) -> None:
    setting = Setting()
    with setting.pipe(balance, chunks=3, checkpoint=checkpoint) as pipe:
        y = pipe(torch.ones(6, 3))
        y.sum().backward()
        assert setting.left() == 0
        del y


@modes
@balances
def test_a_failure_between_stash_and_pop_leaves_no_skip(
    checkpoint: str, balance: list[int]
) -> None:
    setting = Setting(fail=True)
    setting.popped.add(torch.ones(1))
    with setting.pipe(balance, chunks=3, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            with pytest.raises(ValueError, match="the layer in between"):
                pipe(torch.ones(6, 3))
        assert setting.left() == 0


@modes
@balances
def test_a_failure_in_a_recomputation_leaves_no_skip(
    checkpoint: str, balance: list[int]
) -> None:
    setting = Setting()
    with setting.pipe(balance, chunks=3, checkpoint=checkpoint) as pipe:
        y = pipe(torch.ones(6, 3))
        setting.fail = True
        if checkpoint == "never":
            y.sum().backward()
        else:
            with pytest.raises(ValueError, match="the layer in between"):
                y.sum().backward()
        del y
        # Autograd itself keeps what it has not come to until the next backward of the thread.
        torch.autograd.backward(torch.ones((), requires_grad=True).exp())
        assert setting.left() == 0


@pytest.mark.parametrize("balance", [[3], [1, 1, 1]], ids=str)
def test_a_skip_that_nobody_pops_is_gone_with_its_task(balance: list[int]) -> None:
    """The worker lives on. A layer may leave out the layers in it."""

    class LeavesOut(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return x

    setting = Setting()
    setting.popped.add(torch.ones(1))
    setting.layers[2] = LeavesOut(setting.layers[2])
    with setting.pipe(balance, chunks=3) as pipe:
        pipe(torch.ones(6, 3)).sum().backward()
        assert setting.left() == 0
