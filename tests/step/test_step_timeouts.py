"""R6 of a whole step: a layer that never returns, on its way there or back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, PipelineTimeout, WorkerBusyError, is_recomputing
from tests.activations import Activations, until
from tests.callers import Caller
from tests.faults.stuck import SHORT, WAIT, until_back
from tests.layers import Apply
from tests.step.faulty import acting

phases = pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])


class Block:
    """A place where layers do not return until they are told to."""

    def __init__(self, phase: str, i: int, j: int) -> None:
        self.task = phase, i, j
        self.entered, self.go_on = threading.Event(), threading.Event()

    def never_returns(self, *task: Any) -> None:
        if task == self.task and not self.go_on.is_set():
            self.entered.set()
            assert self.go_on.wait(WAIT), "nobody let this layer go on"


class Blocks(nn.Module):
    """A row's first column is its number, and a micro-batch is one row."""

    def __init__(self, j: int, block: Block, seen: Activations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.9, 1.2]))
        self.j, self.block, self.seen = j, block, seen

    def forward(self, x: Tensor) -> Tensor:
        i = int(x.detach()[0, 0].item())
        phase = "recomputation" if is_recomputing() else "forward"
        self.block.never_returns(phase, i, self.j)
        y = acting(x[:, 1:], lambda: self.block.never_returns("backward", i, self.j))
        y = self.seen.add((y * self.weight).tanh())
        return self.seen.add(torch.cat([x[:, :1], y], 1))


class StuckStep:
    """A pipe whose steps get stuck in one task; a context that frees it."""

    def __init__(self, phase: str, i: int = 1, j: int = 1, n: int = 2, m: int = 4) -> None:
        self.block, self.seen = Block(phase, i, j), Activations()
        self.plain = nn.Sequential(*[Blocks(k, self.block, self.seen) for k in range(n)])
        mode = "always" if phase == "recomputation" else "never"
        self.pipe = Pipe(self.plain, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint=mode)
        self.x = torch.cat([torch.arange(float(m)).unsqueeze(1), torch.rand(m, 2)], 1)

    def __enter__(self) -> StuckStep:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.block.go_on.set()
        self.pipe.close(timeout=WAIT)

    def step(self, timeout: float = WAIT, **options: Any) -> Any:
        return self.pipe.forward_backward(
            self.x, loss_fn=loss, reduction="sum", timeout=timeout, **options
        )

    def times_out(self, **options: Any) -> PipelineTimeout:
        for _ in range(20):  # where the machine has other work, it may not get there in time
            try:
                self.step(SHORT, **options)
            except PipelineTimeout as error:
                if "never_returns" in str(error):
                    return error.with_traceback(None)
            self.block.go_on.set()
            until_back(self.step)
            self.pipe.zero_grad()
            self.x.grad = None
            self.block.go_on.clear()
        raise AssertionError("no step got stuck")

    def is_right_when_back(self) -> bool:
        """Let the layer return. Whether the next step is then that of the plain module."""
        self.block.go_on.set()
        self.pipe.zero_grad()
        until_back(self.step)
        found = [parameter.grad for parameter in self.plain.parameters()]
        grads = torch.autograd.grad(loss(self.plain(self.x), None), list(self.plain.parameters()))
        return all(
            one is not None and torch.allclose(one, grad)
            for one, grad in zip(found, grads, strict=True)
        )


def loss(y: Tensor, target: Any) -> Tensor:
    return y[:, 1:].square().sum()


@phases
def test_a_step_that_gets_stuck_raises_with_the_phase_and_the_stack(phase: str) -> None:
    with StuckStep(phase) as stuck:
        error = stuck.times_out()
    (doing,) = (w.doing for w in error.workers if w.doing is not None and w.doing.partition == 1)
    assert (doing.phase, doing.micro_batch) == (phase, 1)
    table, stack = str(error).split("pipert-cpu-1 was at")
    (line,) = (line for line in table.splitlines() if line.startswith("pipert-cpu-1"))
    assert line.split()[1:4] == ["1", "1", phase]
    assert "in never_returns" in stack


@phases
def test_a_step_that_got_stuck_has_changed_no_gradient(phase: str) -> None:
    with StuckStep(phase) as stuck:
        stuck.x.requires_grad_()
        stuck.times_out()
        assert [p.grad for p in (*stuck.plain.parameters(), stuck.x)] == [None] * 3
        stuck.block.go_on.set()
    # Nor when the layer has returned.
    assert [p.grad for p in (*stuck.plain.parameters(), stuck.x)] == [None] * 3


@phases
def test_until_the_layer_returns_steps_and_calls_are_refused_and_then_right(phase: str) -> None:
    with StuckStep(phase) as stuck:
        stuck.times_out()
        with pytest.raises(WorkerBusyError, match="pipert-cpu-1 still busy"):
            stuck.step()
        with pytest.raises(WorkerBusyError, match="pipert-cpu-1 still busy"):
            stuck.pipe(stuck.x)
        assert stuck.is_right_when_back()


@phases
def test_of_a_step_that_was_given_up_only_the_micro_batch_in_the_stuck_layer_is_left(
    phase: str, no_gc: None
) -> None:
    with StuckStep(phase, n=3) as stuck:
        stuck.times_out(return_outputs=True)
        assert until(lambda: stuck.seen.now() <= 4)  # what it got, and what it has saved
        stuck.block.go_on.set()
        assert stuck.seen.left() == 0


def test_a_worker_that_waits_for_a_gradient_is_let_go_while_the_other_is_stuck() -> None:
    with StuckStep("backward") as stuck:
        stuck.times_out()
        assert until(lambda: stuck.pipe.statistics().workers[0].doing is None)
        assert stuck.pipe.statistics().workers[1].doing is not None


def test_an_output_that_comes_late_is_not_kept_while_another_worker_is_stuck(
    no_gc: None,
) -> None:
    """Partition 0 is stuck in F[1,0], and F[0,1] ends after the step was given up."""
    with StuckStep("forward", i=1, j=0) as stuck:
        slow = Block("forward", 0, 1)
        outputs = Activations()

        def late(y: Tensor) -> Tensor:
            slow.never_returns("forward", int(y.detach()[0, 0].item()), 1)
            return outputs.add(y + 0)

        stuck.pipe.close()
        layers = nn.Sequential(*stuck.plain, Apply(late))
        stuck.pipe = Pipe(layers, [1, 2], devices=["cpu"] * 2, chunks=4, checkpoint="never")
        stuck.times_out(return_outputs=True)
        assert slow.entered.wait(WAIT)
        slow.go_on.set()
        assert until(lambda: stuck.pipe.statistics().workers[1].doing is None)
        assert outputs.left() == 0
        assert stuck.pipe.statistics().workers[0].doing is not None


@phases
def test_another_step_that_waits_behind_the_stuck_one_is_right(phase: str) -> None:
    with StuckStep(phase) as stuck:
        first = Caller(stuck.step, WAIT)
        assert stuck.block.entered.wait(WAIT)
        second = Caller(stuck.step, WAIT)
        stuck.block.go_on.set()
        assert torch.equal(first.result(), second.result())
        expected = torch.autograd.grad(
            loss(stuck.plain(stuck.x), None), list(stuck.plain.parameters())
        )
        for parameter, grad in zip(stuck.plain.parameters(), expected, strict=True):
            assert parameter.grad is not None and torch.allclose(parameter.grad, 2 * grad)


def test_a_stuck_step_is_seen_in_the_statistics() -> None:
    with StuckStep("backward") as stuck:
        caller = Caller(stuck.step, WAIT)
        assert stuck.block.entered.wait(WAIT)
        doing = stuck.pipe.statistics().workers[1].doing
        stuck.block.go_on.set()
        caller.result()
    assert doing is not None
    assert (doing.phase, doing.partition, doing.micro_batch) == ("backward", 1, 1)


@phases
def test_a_step_that_another_thread_ends_by_closing_changes_no_gradient(phase: str) -> None:
    with StuckStep(phase) as stuck:
        caller = Caller(stuck.step, WAIT)
        assert stuck.block.entered.wait(WAIT)
        closing = Caller(stuck.pipe.close, WAIT)
        while not stuck.pipe._runtime.pool.closed:
            threading.Event().wait(0.001)
        stuck.block.go_on.set()
        closing.result()
        with pytest.raises(RuntimeError, match="the pipe was closed during the call"):
            caller.result()
        assert [p.grad for p in stuck.plain.parameters()] == [None, None]
