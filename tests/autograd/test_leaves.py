"""Tests that a task's leaves are found, and without deadlocks on leaves that other threads use."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipert import Pipe
from pipert._torch import node_count
from pipert.autograd.leaves import (
    find_leaves,
    is_cast_of_leaf,
)
from pipert.autograd.order import begin_numbers
from tests.helpers import scripts
from tests.helpers.caller_threads import Caller

SCRIPT = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(40, exit=True)
sys.setswitchinterval(1e-6)
import torch
from pipert.stage.gradients import delivery

def operations():
    gate.wait()
    for leaf in leaves:
        leaf * 2

ends = time.monotonic() + SECONDS
while time.monotonic() < ends:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(300)]
    gate = threading.Barrier(2)
    thread = threading.Thread(target=operations)
    thread.start()
    gate.wait()
    for leaf in reversed(leaves):
        delivery([(leaf, torch.ones(2))])
    thread.join()
print("nobody waits")
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, pytest.param(8, marks=pytest.mark.sweep)])
def test_gradients_are_delivered_while_another_thread_begins_to_use_their_leaves(
    seconds: int,
) -> None:
    done = scripts.run(f"SECONDS = {seconds}\n{SCRIPT}")
    assert done.stdout == "nobody waits\n", done.stderr


STEPS = """
import faulthandler, sys
faulthandler.dump_traceback_later(40, exit=True)
sys.setswitchinterval(1e-5)
import torch
from torch import nn
from pipert import Pipe

layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
x = torch.rand(8, 4)
with Pipe(layers, [1] * 4, devices=["cpu"] * 4, chunks=4, checkpoint="always") as pipe:
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(20):
            pipe.forward_backward(x, loss_fn=lambda y, _: y.sum())
print("nobody waits")
"""


def test_workers_that_begin_graphs_in_anomaly_detection_do_not_wait_for_each_other() -> None:
    """Making an ``AccumulateGrad`` then takes the interpreter's lock, for its stack."""
    done = scripts.run(STEPS)
    assert done.stdout == "nobody waits\n", done.stderr


class UsesOneOfTheCaller(nn.Module):
    """Makes a node that no gradient needs, and uses a tensor with a graph of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.callers = [self.scale.detach()]
        self.unused = list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.unused.append(node_count())
        _ = self.scale * 2
        for _ in range(40):
            x = x.exp().sin() * self.scale.cos()
        return x * self.callers[0]


def test_a_node_of_the_caller_is_not_a_task_s_though_its_number_might_be() -> None:
    """It has the number of a node of the task that is in no graph, which no other number tells."""
    layer, x = UsesOneOfTheCaller(), torch.ones(2, 2)

    def call() -> tuple[int, Any]:
        module = nn.Sequential(layer)
        with Pipe(module, [1], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
            for _ in range(2):
                pipe(x)
            first, _, second, _ = layer.unused
            begin_numbers(2 * second - first)
            layer.callers[0] = layer.scale.exp()
            torch.autograd.backward(pipe(x).sum())
        return 2 * second - first, layer.callers[0].grad_fn

    expected, node = Caller(call).result()  # on a thread that has made fewer nodes
    assert node._sequence_nr() == expected


# Casts of weights, which autocast shares among threads --------------------------------------------


def test_only_the_cast_of_a_leaf_is_one() -> None:
    leaf = torch.ones(2, requires_grad=True)
    others = [leaf.exp(), leaf.exp().to(torch.bfloat16), leaf.view(2, 1)]
    nodes = [leaf.to(torch.bfloat16).grad_fn, *[x.grad_fn for x in others]]
    assert list(map(is_cast_of_leaf, nodes)) == [True, False, False, False]


def test_the_cast_of_another_thread_belongs_to_every_graph() -> None:
    """A backward need not retain its graph for it, since it saves nothing."""
    leaf: Any = torch.ones(2, requires_grad=True)
    casts = list[Tensor]()
    thread = threading.Thread(target=lambda: casts.append(leaf.to(torch.bfloat16)))
    thread.start()
    thread.join()
    first = max(node_count(), 1000)
    begin_numbers(first)
    nodes: list[Any] = [(casts[0] * k).sum().grad_fn for k in (2, 3)]
    behind = find_leaves(nodes[:1], (), range(first, node_count()))
    assert behind.leaves == [leaf] and not behind.others
    for node in nodes:
        (found,) = torch.autograd.grad([GradientEdge(node, 0)], [leaf])
        assert found.eq(nodes.index(node) + 2).all()
