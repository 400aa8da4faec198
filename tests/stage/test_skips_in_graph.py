"""Tests skips of a call: which are in transit when, and the nodes that they pass through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipert.workers.worker import NOT_RUN
from tests.layers import Apply
from tests.stage.graphs import chain, inputs_of, scale
from tests.stage.skips import NAMES, NamingStreams, Pop, Stash, popped_in, run_with_skip
from tests.stages import CPU, META, Driven


def never(x: Any) -> Any:
    raise AssertionError("this layer must not run")


def test_partitions_in_between_get_and_send_x_alone(naming: NamingStreams) -> None:
    run = run_with_skip(naming, [CPU, META, CPU])
    for j in range(2):
        run.do(f"F[0,{j}]")
        assert NAMES[len(run.between(j))] == "x"


def test_a_skip_is_sent_before_the_output(naming: NamingStreams) -> None:
    run = run_with_skip(naming, [CPU, CPU, CPU])
    task = run.task("F[0,0]")
    y = task.execute(task.receive())
    assert repr(run.run.skips) == "<SkipLinks, 1 skips and 0 gradients>"
    task.send(y)
    assert NAMES[len(run.between(0))] == "x"


@pytest.mark.parametrize("recomputed", [0, 1])
def test_no_skip_is_in_transit_after_a_run_and_its_backward(
    naming: NamingStreams, recomputed: int
) -> None:
    run = run_with_skip(naming, [CPU, META, CPU, META], recomputed, pops=[2])
    torch.autograd.backward(run.go()[0].sum())  # a recomputation sends nothing
    assert repr(run.run.skips) == "<SkipLinks, 0 skips and 0 gradients>"


def test_the_skip_of_a_task_that_fails_is_not_sent() -> None:
    run = Driven([[Stash(nn.Identity()), Apply(never)], [Pop(Apply(int))]], inputs_of(1))
    run.do("F[0,0]")
    assert repr(run.run.skips) == "<SkipLinks, 0 skips and 0 gradients>"
    assert run.between(0) is NOT_RUN


def test_a_skip_is_one_more_value_of_the_recomputation_and_the_fork() -> None:
    """The backward of the stash ends before that of the previous micro-batch begins."""
    run = Driven([[Stash(scale())], [Pop(scale())]], inputs_of(2), recomputed=2)
    run.do("F[0,0]", "F[1,0]")
    ys = [run.stages[0].links.y.receive(i) for i in range(2)]
    ((key, _),) = run.stages[1].arriving
    skips = [run.run.skips.receive(key, i, 1) for i in range(2)]
    assert [chain(skip)[:2] for skip in skips] == [
        ["_Fork", "_Recompute"],
        ["_Recompute", "Mul0"],  # y comes first
    ]
    assert [skip.grad_fn for skip in skips] == [y.grad_fn for y in ys]


@pytest.mark.parametrize(
    ("through", "node"), [(nn.Identity(), "Repeat0"), (Apply(torch.argmax), "_Join")]
)
def test_a_skip_takes_the_token_where_x_cannot(through: nn.Module, node: str) -> None:
    first, second = popped_in(through, 2)
    assert (chain(first)[0], chain(second)[0]) == ("_Fork", node)
