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
    model.late = nn.BatchNorm1d(4, track_running_stats=False)  # both partitions call it
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


class Siamese(nn.Module):
    """Calls its trunk, with a cut inside, twice: what comes first there is called in both parts."""

    def __init__(self, norm: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Unflatten(1, (2, 2)), norm(2, **options), nn.Flatten())
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x)) + self.last(self.first(2 * x))
        return y


def train(
    model: nn.Module, how: str, deferred: bool, chunks: int = 8, device: str = "cpu"
) -> dict[str, Tensor]:
    options: Any = {"devices": [device] * 2, "chunks": chunks, "deferred_batch_norm": deferred}
    with pipert.pipeline(model, ["last"], **options) as pipe:
        if how == "call":
            pipe(torch.ones(16, 4)).sum().backward()
        else:
            pipe.forward_backward(torch.ones(16, 4), loss_fn=lambda y, _: y.sum(), schedule=how)
    return dict(model.named_buffers())


hows = pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])


@hows
@pytest.mark.filterwarnings("ignore::pipert.WholeBatchWarning")
@pytest.mark.parametrize(
    "norm, options, deferred",
    [(nn.BatchNorm1d, {}, False), (nn.InstanceNorm1d, {"track_running_stats": True}, True)],
)
def test_statistics_that_two_partitions_update_are_refused(
    norm: type[nn.Module], options: Any, deferred: bool, how: str
) -> None:
    """They were updated in the order in which the workers came."""
    model = Siamese(norm, **options)
    with pytest.raises(ValueError, match="called in partitions 0 and 1, .*deferred_batch_norm"):
        train(model, how, deferred)


@hows
def test_they_may_be_shared_where_they_are_deferred_or_not_updated(how: str) -> None:
    train(Siamese(nn.BatchNorm1d, track_running_stats=False), how, deferred=False)
    train(Siamese(nn.BatchNorm1d).eval(), how, deferred=False)
    train(Siamese(nn.BatchNorm1d), how, deferred=False, chunks=1)
    train(Siamese(nn.BatchNorm1d), how, deferred=False, device="cpu:0")  # one worker, in its order
    found = train(Siamese(nn.BatchNorm1d), how, deferred=True)
    assert int(found["first.1.num_batches_tracked"]) == 2


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_statistics_of_a_norm_that_moves_to_its_device_in_the_first_run_are_deferred() -> None:
    class Late(Normalising):
        def forward(self, x: Tensor) -> Tensor:
            x = self.early(x)  # registered behind the cut, called before it
            y: Tensor = self.last(self.first(x))
            return y

    model = Late()
    plain, x = copy.deepcopy(model), torch.randn(6, 4)
    with pipert.pipeline(
        model, ["last"], devices=["cuda:0", "cuda:1"], chunks=3, deferred_batch_norm=True
    ) as pipe:
        pipe.forward_backward(x.to("cuda:0"), loss_fn=lambda y, _: y.square().mean())
        plain(x)
        for found, expected in zip(model.early.buffers(), plain.early.buffers(), strict=True):
            torch.testing.assert_close(found.cpu(), expected)
