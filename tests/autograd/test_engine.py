"""Tests the call of autograd's engine: the gradients of the public call, and no side effects."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from pipert.autograd.engine import differentiate


@pytest.fixture
def leaf() -> torch.Tensor:
    return torch.arange(3.0, requires_grad=True)


def test_the_engine_returns_the_gradients_of_autograd_grad(leaf: torch.Tensor) -> None:
    y, dy = leaf.square(), torch.tensor([1.0, 2.0, 3.0])
    expected = torch.autograd.grad(y, leaf, dy, retain_graph=True)
    (found,) = differentiate([get_gradient_edge(y)], [leaf], [dy])
    assert found is not None and torch.equal(found, expected[0])


def test_the_engine_does_not_touch_grad(leaf: torch.Tensor) -> None:
    y = leaf.square()
    differentiate([y], [leaf], [torch.ones(3)])
    assert leaf.grad is None


def test_a_backward_for_no_inputs_does_nothing(leaf: torch.Tensor) -> None:
    """All parameters that were used may have been frozen since."""
    y = leaf.square()
    assert differentiate([y], [], [torch.ones(3)]) == ()
    assert leaf.grad is None


def test_unused_inputs_get_none(leaf: torch.Tensor) -> None:
    unused = torch.ones((), requires_grad=True)
    found = differentiate([leaf.square()], [unused, leaf], [torch.ones(3)])
    assert found[0] is None and found[1] is not None


def test_a_graph_is_freed_unless_it_is_used_again(leaf: torch.Tensor) -> None:
    y, dy = leaf.square(), torch.ones(3)
    differentiate([y], [leaf], [dy], retain_graph=True)
    differentiate([y], [leaf], [dy])
    with pytest.raises(RuntimeError, match="second time"):
        differentiate([y], [leaf], [dy])


def test_gradients_have_a_graph_if_asked_for(leaf: torch.Tensor) -> None:
    (dx,) = differentiate([leaf.pow(3)], [leaf], [torch.ones(3)], create_graph=True)
    assert dx is not None
    (twice,) = torch.autograd.grad(dx.sum(), leaf)
    assert torch.equal(twice, 6 * leaf)


def test_gradients_that_cannot_be_summed_to_the_shape_are_refused(leaf: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        differentiate([leaf.square()], [leaf], [torch.ones(2, 2)])


def test_the_engine_hides_function_modes_as_every_backward_does(leaf: torch.Tensor) -> None:
    devices = []
    y = leaf.square()
    y.register_hook(  # type: ignore[no-untyped-call]
        lambda _: devices.append(torch.empty(0).device.type)
    )
    with torch.device("meta"):
        differentiate([y], [leaf], [torch.ones(3, device="cpu")])
    assert devices == ["cpu"]
