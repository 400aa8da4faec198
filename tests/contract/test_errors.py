"""Tests R3 to R5 in steps and calls: which error is raised, which tasks run, what is left."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipert import Pipe, is_recomputing
from pipert.schedules import plan
from pipert.schedules.plan import plan_call
from tests.helpers.activations import Activations
from tests.helpers.failing_steps import Acts, acting
from tests.helpers.noted_failures import Failures
from tests.helpers.ways import CALL
from tests.layers import Apply

SCHEDULES = ("gpipe", "1f1b")

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def rows(m: int) -> Tensor:
    """Makes ``m`` micro-batches of one row, whose first column is its number."""
    return torch.cat([torch.arange(float(m)).unsqueeze(1), torch.rand(m, 2)], 1)


class Steps:
    """A pipe of ``n`` partitions; ``act(phase, i, j)`` is called in each F, B and R."""

    def __init__(
        self, act: Callable[[str, int, int], None], n: int = 2, m: int = 4, **options: Any
    ) -> None:
        def of(j: int) -> Acts:
            def act_of_layer(phase: str, i: int) -> None:
                again = phase == "forward" and is_recomputing()
                act("recomputation" if again else phase, i, j)

            return Acts(act_of_layer)

        self.x = rows(m)
        layers = nn.Sequential(*map(of, range(n)))
        self.pipe = Pipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, **options)

    def step(self, schedule: str = "1f1b", **options: Any) -> Any:
        return self.pipe.forward_backward(
            self.x, loss_fn=sum_of_squares, reduction="sum", schedule=schedule, **options
        )


def sum_of_squares(y: Tensor, target: Any) -> Tensor:
    return y[:, 1:].square().sum()


@schedules
def test_tasks_before_the_failure_run_and_none_after_it_on_the_same_worker(
    schedule: str,
) -> None:
    done: list[tuple[str, int, int]] = []

    def act(*task: Any) -> None:
        done.append(task)
        if task == ("backward", 1, 1):
            raise ValueError

    steps = Steps(act, checkpoint="never")
    with steps.pipe, pytest.raises(ValueError):
        steps.step(schedule)
    names = {"F": "forward", "B": "backward"}
    order = [(names[kind], i, j) for kind, i, j in plan(schedule, 4, 2).order]
    before = order[: order.index(("backward", 1, 1)) + 1]
    of_worker = [task for task in before if task[2] == 1]
    assert [task for task in done if task[2] == 1] == of_worker
    assert set(before) <= set(done)


# What it says -------------------------------------------------------------------------------------


def error_of(
    phase: str, i: int, j: int, mode: str = "never", **options: Any
) -> pytest.ExceptionInfo[ValueError]:
    def act(*task: Any) -> None:
        if task == (phase, i, j):
            raise ValueError("no")

    steps = Steps(act, n=3, checkpoint=mode)
    with steps.pipe, pytest.raises(ValueError, match="no") as caught:
        steps.step(**options)
    return caught


def test_an_error_of_a_backward_says_which_task_it_was() -> None:
    error = error_of("backward", 2, 1).value
    assert error.__notes__ == ["in backward B[2,1]: partition 1 on cpu, micro-batch 2 of 4"]


def test_an_error_of_the_loss_says_which_task_it_was() -> None:
    def no(*_: Any) -> Tensor:
        raise ValueError("no")

    with Steps(lambda *_: None).pipe as pipe, pytest.raises(ValueError) as caught:
        pipe.forward_backward(rows(4), loss_fn=no)
    assert caught.value.__notes__ == [
        "in forward F[0,1]: partition 1 on cpu, loss_fn, micro-batch 0 of 4, "
        "output float32[1, 3], target NoneType; forward_backward got no target: does the call lack "
        "target=...?"
    ]


@pytest.mark.parametrize(("target", "name"), [(rows(3), "target"), ({"y": rows(3)}, "target['y']")])
def test_a_target_with_other_rows_than_the_input_is_named(target: Any, name: str) -> None:
    with Steps(lambda *_: None).pipe as pipe, pytest.raises(ValueError) as caught:
        pipe.forward_backward(rows(4), target=target, loss_fn=functional.mse_loss)
    assert f"args[0] has 4 and {name} has 3;" in str(caught.value)


@pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])
def test_the_traceback_ends_where_it_was_raised(phase: str) -> None:
    caught = error_of(phase, 1, 1, "always")
    assert traceback.extract_tb(caught.tb)[-1].name == "act"


# What is left -------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A layer that saves activations in two branches; one branch's backward calls ``act``."""

    def __init__(self, seen: Activations, act: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen = seen
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.tanh(x * self.weight), torch.exp(x * self.weight)
        for kept in (one, other):
            self.seen.add(kept)
        return acting(one, self.act) + other.exp().sin()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_worker_whose_backward_failed_does_not_keep_autograds_pending_nodes(
    checkpoint: str, no_gc: None
) -> None:
    seen = Activations()

    def no() -> None:
        raise ValueError

    model = nn.Sequential(nn.Linear(3, 3), Branches(seen, no), nn.Linear(3, 3))
    with Pipe(model, [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint) as pipe:
        with pytest.raises(ValueError):
            pipe.forward_backward(rows(8), target=rows(8), loss_fn=functional.mse_loss)
        assert seen.left() == 0


def test_an_error_in_the_graph_of_the_inputs_leaves_the_gradients_of_parameters_alone() -> None:
    def no() -> None:
        raise ValueError("no")

    steps = Steps(lambda *_: None, n=3)
    with steps.pipe as pipe:
        steps.x = acting(steps.x.requires_grad_(), no)
        with pytest.raises(ValueError, match="no"):
            steps.step()
        assert [p.grad for p in pipe.parameters()] == [None, None, None]


def test_outputs_that_cannot_be_joined_leave_every_gradient_alone() -> None:
    def ragged(x: Tensor) -> Tensor:
        return x[:, : 2 + int(x.detach()[0, 0].item() > 0)]

    model = nn.Sequential(Acts(lambda *_: None), Apply(ragged))
    with Pipe(model, [1, 1], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(ValueError):
            pipe.forward_backward(rows(2), loss_fn=sum_of_squares, return_outputs=True)
        assert pipe[0].weight.grad is None
        pipe.forward_backward(rows(2), loss_fn=sum_of_squares)  # nobody joins them
        assert pipe[0].weight.grad is not None


def test_a_failed_step_does_not_update_deferred_statistics() -> None:
    failing = [True]

    def act(*task: Any) -> None:
        if failing and task == ("backward", 3, 0):
            raise ValueError

    norm = nn.BatchNorm1d(3)
    layers = nn.Sequential(Acts(lambda phase, i: act(phase, i, 0)), norm)
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, deferred_batch_norm=True) as pipe:
        x = torch.cat([torch.arange(4.0).repeat_interleave(2).unsqueeze(1), torch.rand(8, 2)], 1)
        before = norm.running_mean.clone() if norm.running_mean is not None else None
        assert before is not None and norm.running_mean is not None
        with pytest.raises(ValueError):
            pipe.forward_backward(x, loss_fn=sum_of_squares)
        assert torch.equal(norm.running_mean, before)
        failing.clear()
        pipe.forward_backward(x, loss_fn=sum_of_squares)
        assert not torch.equal(norm.running_mean, before)


class Stores(nn.Linear):
    """Keeps a loss of its own, such as that of a gate, on itself."""

    loss: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.loss = y.square().mean()
        return y


@pytest.mark.layered  # any model names what it has kept
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stored_loss_whose_graph_a_backward_has_gone_through_is_explained(schedule: str) -> None:
    layers, x = [Stores(3, 3) for _ in range(4)], torch.randn(6, 3)
    with Pipe(nn.Sequential(*layers), [2, 2], devices=["cpu"] * 2, chunks=3) as pipe:
        pipe.forward_backward(x, loss_fn=lambda y, _: y.mean())
        stored = torch.stack([layer.loss for layer in layers])
        with pytest.raises(RuntimeError) as caught:
            pipe.forward_backward(
                x, loss_fn=lambda y, _: y.mean() + stored.sum(), schedule=schedule
            )
    assert "return it from the layers up to loss_fn" in "".join(caught.value.__notes__)


Task = tuple[str, int, int]

M, N = 4, 2
LETTERS = {"forward": "F", "backward": "B"}
PAIRS = [
    (("forward", 1, 0), ("forward", 0, 1), CALL),
    (("forward", 3, 0), ("forward", 0, 1), CALL),  # a fast partition has run ahead
    (("forward", 1, 0), ("backward", 0, 1), "1f1b"),
    (("forward", 2, 0), ("forward", 1, 1), "gpipe"),
    (("backward", 0, 0), ("backward", 1, 1), "1f1b"),
    (("backward", 3, 0), ("backward", 2, 1), "gpipe"),
]


@pytest.mark.parametrize("late", [0, 1], ids=["the first fails last", "the first fails first"])
@pytest.mark.parametrize(("one", "other", "schedule"), PAIRS)
def test_the_first_of_two_failures_in_schedule_order_is_raised(
    one: Task, other: Task, schedule: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = plan_call(M, N, range(N)) if schedule == CALL else plan(schedule, M, N)
    order = [str(action) for action in of]
    both = sorted((one, other), key=lambda task: order.index("%s[%d,%d]" % _named(task)))
    executing, failures = threading.Barrier(2), Failures(monkeypatch)

    def act(*task: Any) -> None:
        if task in both:
            executing.wait(20)
            if task == both[late]:
                failures.wait()
            raise ValueError(task)

    steps = Steps(act, N, M, checkpoint="never")
    with steps.pipe, pytest.raises(ValueError) as caught:
        if schedule == CALL:
            sum_of_squares(steps.pipe(steps.x), None).backward()  # type: ignore[no-untyped-call]
        else:
            steps.step(schedule)
    assert caught.value.args == (both[0],)


def _named(task: Task) -> tuple[str, int, int]:
    return LETTERS[task[0]], *task[1:]
