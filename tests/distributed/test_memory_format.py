"""Tests that tensors sent from rank to rank keep their memory format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipert.distributed.boundary import Boundary, sample_of

MAKES: dict[str, Callable[[int], Tensor]] = {
    "channels last": lambda rows: torch.randn(rows, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda rows: torch.randn(4, rows).t(),
    "transposed, whole numbers": lambda rows: torch.arange(4 * rows).view(4, rows).t(),
    "complex": lambda rows: torch.randn(3, rows, 2, dtype=torch.complex64).permute(1, 2, 0),
    "conjugate": lambda rows: torch.randn(3, rows, dtype=torch.complex64).t().conj(),
    "in order": lambda rows: torch.randn(rows, 2, 3),
    "a number": lambda rows: torch.tensor(2.0),
}


@pytest.mark.parametrize("kinds", [[0, 0], [0, 1]], ids=["alike", "ragged"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_a_tensor_arrives_as_it_left(make: Callable[[int], Tensor], kinds: list[int]) -> None:
    values = [make(6), make(5)][: len(set(kinds))]
    boundary = Boundary(1, [sample_of((value,), {}) for value in values], kinds)
    for i, kind in enumerate(kinds):
        value = values[kind]
        sent = boundary.pack(i, (value,))
        assert all(tensor.is_contiguous() for tensor in sent)
        (arrived,) = boundary.unpack(i, tuple(tensor.clone() for tensor in sent))
        torch.testing.assert_close(arrived, value.resolve_conj(), rtol=0, atol=0)
        assert arrived.stride() == value.stride()


def test_a_dense_tensor_in_another_order_is_sent_without_a_copy() -> None:
    value = MAKES["channels last"](6)
    boundary = Boundary(1, [sample_of((value,), {})], [0])
    assert boundary.pack(0, (value,))[0].data_ptr() == value.data_ptr()


def test_a_tensor_that_is_not_dense_arrives_in_order() -> None:
    value = torch.randn(6, 8)[:, ::2]
    boundary = Boundary(1, [sample_of((value,), {})], [0])
    (arrived,) = boundary.unpack(0, boundary.pack(0, (value,)))
    assert arrived.is_contiguous()
    assert torch.equal(arrived, value)


def test_a_gradient_comes_back_through_the_format() -> None:
    value = MAKES["transposed"](6).requires_grad_()
    boundary = Boundary(1, [sample_of((value,), {})], [0])
    (arrived,) = boundary.unpack(0, boundary.pack(0, (value,)))
    weights = torch.randn(6, 4)
    (arrived * weights).sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, weights)
