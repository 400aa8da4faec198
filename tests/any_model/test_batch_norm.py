"""Tests running statistics of an unchanged model, deferred to the end of a mini-batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import How, each_how, step


class Normalising(nn.Module):
    """A model whose first-called norm is placed after the cut; another norm is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.late, self.early = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.late(self.last(self.late(self.first(self.early(x)))))
        return y


@each_how
@pytest.mark.parametrize("momentum", [0.1, None], ids=["moving average", "cumulative average"])
def test_statistics_are_updated_once_from_the_whole_batch(momentum: Any, how: How) -> None:
    model = Normalising().double()
    model.early.momentum = model.late.momentum = momentum
    batch = {"x": 3 * torch.randn(ROWS, 4, dtype=torch.float64) + 1}
    own = Family("normalising", lambda: Made(model, batch), ("last",))
    piped, plain = copy.deepcopy(model), copy.deepcopy(model)
    plain(batch["x"])
    found = step(piped, batch, own, how._replace(rows=ROWS), deferred_batch_norm=True).buffers
    expected = dict(plain.named_buffers())
    assert int(found["early.num_batches_tracked"]) == 1
    assert int(found["late.num_batches_tracked"]) == 2
    for name in ("early.running_mean", "early.running_var"):
        torch.testing.assert_close(found[name], expected[name])
    # Behind it values are normalised by micro-batches, so others are not those of the batch.
    assert bool(found["late.running_mean"].any())


def test_recomputation_by_an_outer_pipe_does_not_update_statistics_again() -> None:
    model = Normalising()
    options: Any = {"devices": ["cpu"] * 2, "chunks": 2, "deferred_batch_norm": False}
    inner = pipert.pipeline(model, ["last"], **options)
    layers = nn.Sequential(nn.Sequential(inner, nn.Tanh()), nn.Identity())
    outer = pipert.Pipe(layers, [1, 1], checkpoint="always", **options)
    with inner, outer:
        loss = outer(torch.rand(8, 4)).sum()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss.backward()
    assert int(before["early.num_batches_tracked"]) == 4
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
