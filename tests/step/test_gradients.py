"""Sums of gradients: what is added to what, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, gradients
from pipert.gradients import Gradients

META = torch.device("meta")


def test_a_weight_of_another_device_is_summed_where_its_gradients_are() -> None:
    weight = torch.ones(3, requires_grad=True)
    sums = Gradients()
    for _ in range(3):
        sums.add([weight], [torch.empty(3, device=META)])
    assert sums.take()[weight].device == META


def test_the_first_gradient_is_never_changed() -> None:
    weight, first = torch.ones(2, requires_grad=True), torch.ones(2)
    sums = Gradients()
    for gradient in (first, torch.ones(2), torch.ones(2)):
        sums.add([weight], [gradient])
    assert first.tolist() == [1.0, 1.0]
    assert sums.take()[weight].tolist() == [3.0, 3.0]


def test_a_weight_that_was_not_used_has_no_sum() -> None:
    weight = torch.ones(2, requires_grad=True)
    sums = Gradients()
    sums.add([weight], [None])
    assert not sums.take()


def test_the_sums_of_a_step_become_the_gradients_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copied, all gradients would be there twice at the end of a step."""
    sums: list[int] = []

    def delivery(arriving: list[tuple[Tensor, Tensor]]) -> Any:
        sums.extend(gradient.data_ptr() for _, gradient in arriving)
        return plain(arriving)

    plain = gradients.delivery
    monkeypatch.setattr("pipert.step.delivery", delivery)
    with Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2) as pipe:
        pipe.chunks = 2
        pipe.forward_backward(torch.rand(4, 3), loss_fn=lambda y, _: y.sum())
        grads = [parameter.grad for parameter in pipe.parameters()]
    assert {grad.data_ptr() for grad in grads if grad is not None} == set(sums)
