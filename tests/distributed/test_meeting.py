"""Tests the rehearsal of a new shape: its side effects and its needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import distributed
from tests.distributed.launcher import run

X, TARGET = torch.arange(16.0).reshape(4, 4) / 16, torch.zeros(4, 4)


class MakesItsBuffer(nn.Module):
    """Makes a buffer in its first forward, and remembers that it has."""

    is_made = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_made:
            self.register_buffer("table", torch.full((4,), 2.0), persistent=False)
            self.is_made = True
        return x * self.get_buffer("table")


def makes_its_buffer(rank: int) -> float:
    pipe = distributed.Pipe(nn.Sequential(MakesItsBuffer(), nn.Identity()), [1, 1], chunks=2)
    return float(pipe.forward_backward(X.requires_grad_(), target=TARGET, loss_fn=F.mse_loss))


def test_a_buffer_that_a_layer_makes_stays() -> None:
    assert run(2, makes_its_buffer) == [pytest.approx(float((2 * X).square().mean()))] * 2


class Fails(nn.Linear):
    """A layer that fails."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


def draws_and_fails(rank: int) -> bool:
    torch.manual_seed(0)
    pipe = distributed.Pipe(nn.Sequential(nn.Dropout(), Fails(4, 4)), [1, 1])
    before = torch.get_rng_state()
    with pytest.raises(distributed.RankError if rank == 0 else ValueError):
        pipe.forward_backward(X.requires_grad_(), target=TARGET, loss_fn=F.mse_loss)
    return torch.equal(before, torch.get_rng_state())


def test_a_mini_batch_that_fails_after_it_has_drawn_advances_the_generator() -> None:
    assert run(2, draws_and_fails) == [False, True]


def without_numpy(rank: int) -> float:
    def numpy(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Numpy is not available")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "numpy", numpy)
        pipe = distributed.Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2)
        return float(pipe.forward_backward(X.requires_grad_(), target=TARGET, loss_fn=F.mse_loss))


def test_numpy_is_not_needed() -> None:
    assert run(2, without_numpy) == [pytest.approx(float(X.square().mean()))] * 2
