"""Tests that a step drops values that no later backward needs, at their source and after it.

On CPU, where both devices are one. ``tests/devices/test_peak_memory.py`` has the bytes of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.batch.tensors import alone
from tests.activations import Activations
from tests.devices.lockstep import in_lockstep
from tests.layers import Apply


def test_inputs_and_outputs_that_no_operation_saves_are_not_kept() -> None:
    between, counts = Activations(), list[int]()

    def loss(y: Tensor, target: Any) -> Tensor:
        counts.append(between.now())
        return y.sum()

    model = nn.Sequential(
        nn.Linear(3, 3), Apply(lambda x: between.add(x + 1)),
        Apply(lambda x: x + 1), nn.Linear(3, 3),
    )  # fmt: skip
    with Pipe(model, [2, 2], devices=["cpu"] * 2, chunks=5, checkpoint="never") as pipe:
        with in_lockstep():
            pipe.forward_backward(torch.rand(5, 3), loss_fn=loss, schedule="gpipe")
    assert max(counts) <= 2  # in the hands of the worker, and the one that was sent meanwhile


def test_a_gradient_that_waits_is_no_part_of_a_larger_one() -> None:
    whole, number = torch.ones(4, 6), torch.ones(1).expand(4)
    assert alone(whole) is whole and alone(number) is number
    part = alone(whole[:, 1:3])
    assert torch.equal(part, whole[:, 1:3]) and part.untyped_storage().nbytes() == part.nbytes
