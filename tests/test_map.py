"""Tests ``pipe.map``: micro-batches go through as they come, and their outputs come in order."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, pipeline
from tests.layers import Apply
from tests.mapped import MANY, N, Source, a_pipe, batches, kinds, layers


def slow(x: Tensor) -> Tensor:
    """Takes longer for micro-batches of one row, so that later ones would be done first."""
    time.sleep(0.004 if len(x) == 1 else 0.0)
    return x


@kinds
@pytest.mark.parametrize("number", [0, 1, 2 * N, MANY])
def test_outputs_come_in_order(kind: str, number: int) -> None:
    own, xs = layers(Apply(slow)), batches(number)
    with torch.no_grad(), a_pipe(kind, *own) as pipe:
        found = list(pipe.map(xs))
        expected = [nn.Sequential(*own)(x) for x in xs]
    assert len(found) == number and not any(y.requires_grad for y in found)
    assert all(map(torch.equal, found, expected))


class Affine(nn.Module):
    def forward(self, x: Tensor, scale: float, *, shift: float = 0.0) -> Tensor:
        return x * scale + shift


@kinds
def test_arguments_are_as_in_a_step(kind: str) -> None:
    x = torch.ones(2)
    given = [{"x": x, "scale": 2.0, "shift": 1.0}, (x, 3.0)]
    with Pipe(nn.Sequential(Affine()), [1], devices=["cpu"]) if kind == "Pipe" else pipeline(
        Affine(), [], devices=["cpu"]
    ) as pipe:
        assert [y.tolist() for y in pipe.map(given)] == [[3.0, 3.0], [3.0, 3.0]]


@kinds
def test_micro_batches_are_read_as_needed(kind: str) -> None:
    source = Source(batches())
    with torch.no_grad(), a_pipe(kind, *layers()) as pipe:
        outputs = pipe.map(source)
        assert source.read == 0
        for k, _ in enumerate(outputs):
            assert source.read == min(MANY, k + 2 * N + 1)
            assert pipe.statistics().in_flight <= 2 * N
    assert source.read == MANY


@kinds
def test_all_partitions_are_busy_at_once_with_neighbours(kind: str) -> None:
    """Each layer waits until all are inside: one micro-batch at a time would break the barrier."""
    barrier = threading.Barrier(N)

    def meeting(j: int) -> nn.Module:
        def meet(x: Tensor) -> Tensor:
            if x == 10 - j:
                barrier.wait(10.0)
            return x

        return Apply(meet)

    with torch.no_grad(), a_pipe(kind, *map(meeting, range(N))) as pipe:
        assert list(pipe.map(iter(torch.arange(float(MANY))))) == list(range(MANY))


@kinds
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_outputs_have_their_graphs(kind: str, checkpoint: str) -> None:
    own, xs = layers(), batches()
    plain = nn.Sequential(*own)
    expected = torch.autograd.grad(
        sum((plain(x).square().mean() for x in xs), torch.zeros(())), [*plain.parameters()]
    )
    with a_pipe(kind, *own, checkpoint=checkpoint) as pipe:
        total = sum((y.square().mean() for y in pipe.map(xs)), torch.zeros(()))
        found = torch.autograd.grad(total, [*plain.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@kinds
def test_the_mode_of_gradients_is_that_of_each_moment(kind: str) -> None:
    with a_pipe(kind, *layers()) as pipe:
        outputs = pipe.map(batches(4 * N))
        with torch.no_grad():
            first = next(outputs)
        last = list(outputs)[-1]
    assert not first.requires_grad and last.requires_grad


@kinds
@pytest.mark.parametrize("given", [torch.ones(2, 3), {"x": torch.ones(2, 3)}, 3, "ab"])
def test_what_is_no_iterable_of_micro_batches_is_refused_at_once(kind: str, given: Any) -> None:
    with a_pipe(kind, *layers()) as pipe, pytest.raises(TypeError, match="must be an iterable"):
        pipe.map(given)


@kinds
def test_calls_and_other_maps_may_come_between(kind: str) -> None:
    own, xs, others = layers(), batches(), batches()
    plain = nn.Sequential(*own)
    with torch.no_grad(), a_pipe(kind, *own) as pipe:
        for x, y, other, z in zip(xs, pipe.map(xs), others, pipe.map(others), strict=True):
            assert torch.equal(y, plain(x)) and torch.equal(z, plain(other))
            assert torch.equal(pipe(x), y)
        assert pipe.statistics().in_flight == 0


@kinds
def test_random_numbers_are_those_of_one_call_after_the_other(kind: str) -> None:
    xs = [torch.ones(2, 3, dtype=torch.float64)] * MANY
    with torch.no_grad(), a_pipe(kind, *layers(nn.Dropout())) as pipe:
        torch.manual_seed(3)
        expected = [pipe(x) for x in xs]
        torch.manual_seed(3)
        found = list(pipe.map(xs))
    assert all(map(torch.equal, found, expected))
    assert len({tuple(y.flatten().tolist()) for y in found}) > MANY / 2


@kinds
@pytest.mark.parametrize("deferred", [False, True])
def test_running_statistics_are_those_of_one_call_after_the_other(
    kind: str, deferred: bool
) -> None:
    norm, other = (nn.BatchNorm1d(4, dtype=torch.float64) for _ in range(2))
    first, _, last = layers()
    xs = [torch.randn(4, 3, dtype=torch.float64) for _ in range(MANY)]
    for x in xs:
        other(first(x))
    with torch.no_grad(), a_pipe(kind, first, norm, last, deferred_batch_norm=deferred) as pipe:
        list(pipe.map(xs))
    torch.testing.assert_close(
        dict(norm.named_buffers()), dict(other.named_buffers()), rtol=1e-12, atol=0
    )


@pytest.mark.multi_gpu
@kinds
@pytest.mark.parametrize("there", ["cpu", "cuda:1"])
def test_outputs_are_on_the_last_device(kind: str, there: str) -> None:
    own, xs = layers(), batches()
    expected = [nn.Sequential(*own)(x).detach() for x in xs]
    with torch.no_grad(), a_pipe(kind, *own, devices=["cuda:0", "cuda:1", "cuda:1"]) as pipe:
        found = list(pipe.map(x.to(there) for x in xs))
    assert all(y.device == torch.device("cuda:1") for y in found)
    torch.testing.assert_close([y.cpu() for y in found], expected, rtol=1e-12, atol=0)
