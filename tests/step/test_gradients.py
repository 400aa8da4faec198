"""Sums of gradients: what is added to what, and where."""

from __future__ import annotations

import torch

from pipert.gradients import Gradients

META = torch.device("meta")


def test_a_weight_of_another_device_is_summed_where_its_gradients_are() -> None:
    weight = torch.ones(3, requires_grad=True)
    gradients = Gradients()
    for _ in range(3):
        gradients.add([weight], [torch.empty(3, device=META)])
    assert gradients.take()[weight].device == META


def test_the_first_gradient_is_never_changed() -> None:
    weight, first = torch.ones(2, requires_grad=True), torch.ones(2)
    gradients = Gradients()
    for gradient in (first, torch.ones(2), torch.ones(2)):
        gradients.add([weight], [gradient])
    assert first.tolist() == [1.0, 1.0]
    assert gradients.take()[weight].tolist() == [3.0, 3.0]


def test_a_weight_that_was_not_used_has_no_sum() -> None:
    weight = torch.ones(2, requires_grad=True)
    gradients = Gradients()
    gradients.add([weight], [None])
    assert not gradients.take()
