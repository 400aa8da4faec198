"""Tests ``pipe.map``: micro-batches go through as they come, and outputs come in order."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, PipeClosedError, PipelineTimeout, ReentrantCallError, pipeline
from pipert.engine.waiting import Waiting
from tests.helpers.collection import settle
from tests.helpers.ways import linear
from tests.layers import Apply

N = 3
MANY = 20

kinds = pytest.mark.parametrize("kind", ["Pipe", "pipeline"])


def a_pipe(kind: str, *layers: nn.Module, **options: Any) -> Any:
    model = nn.Sequential(*layers)
    options = {"devices": ["cpu"] * len(layers), **options}
    if kind == "Pipe":
        return Pipe(model, [1] * len(layers), **options)
    return pipeline(model, [str(j) for j in range(1, len(layers))], **options)


def layers(middle: nn.Module | None = None) -> list[nn.Module]:
    return [linear(3, 4), middle or nn.Tanh(), linear(4, 2)]


def batches(number: int = MANY) -> list[Tensor]:
    return [torch.randn(1 + k % 4, 3, dtype=torch.float64) for k in range(number)]


class Source:
    """Counts how many micro-batches have been read."""

    def __init__(self, xs: list[Any], failing_at: int | None = None) -> None:
        self.xs = xs
        self.failing_at = failing_at
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for k, x in enumerate(self.xs):
            if k == self.failing_at:
                raise OSError("no more data")
            self.read += 1
            yield x


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


def of_seven_rows(x: Tensor) -> Tensor:
    if len(x) == 7:
        raise ValueError("seven")
    return x


@kinds
@pytest.mark.parametrize("at", [0, 1, 2 * N + 2, MANY - 1])
def test_an_error_of_a_layer_comes_in_order_and_the_pipe_remains_usable(
    kind: str, at: int
) -> None:
    xs = batches()
    xs[at] = torch.ones(7, 3, dtype=torch.float64)
    found = []
    with torch.no_grad(), a_pipe(kind, *layers(Apply(of_seven_rows))) as pipe:
        with pytest.raises(ValueError, match="seven") as caught:
            for y in pipe.map(xs):
                found.append(y)
        assert len(found) == at and any("partition 1" in n for n in caught.value.__notes__)
        statistics = pipe.statistics()
        assert (statistics.in_flight, statistics.failures) == (0, 1)
        assert statistics.succeeded + statistics.cancellations + 1 == statistics.runs
        assert len(list(pipe.map(batches()))) == MANY


@kinds
@pytest.mark.parametrize("at", [0, 3, MANY - 1])
def test_an_error_of_the_iterable_is_raised_and_those_in_flight_are_cancelled(
    kind: str, at: int
) -> None:
    found = []
    with torch.no_grad(), a_pipe(kind, *layers()) as pipe:
        with pytest.raises(OSError, match="no more data"):
            for y in pipe.map(Source(batches(), at)):
                found.append(y)
        assert len(found) == max(0, at - 2 * N) and pipe.statistics().in_flight == 0
        assert len(list(pipe.map(batches()))) == MANY


@kinds
@pytest.mark.parametrize("ends", ["close", "del", "throw"])
def test_ended_early_it_cancels_those_in_flight(kind: str, ends: str) -> None:
    source, calls = Source(batches()), []
    with torch.no_grad(), a_pipe(kind, *layers(Apply(lambda x: calls.append(1) or x))) as pipe:
        outputs: Any = pipe.map(source)
        next(outputs)
        if ends == "close":
            outputs.close()
        elif ends == "throw":
            with pytest.raises(KeyError):
                outputs.throw(KeyError())
        del outputs
        settle()
        statistics, seen = pipe.statistics(), len(calls)
        assert statistics.in_flight == 0 and source.read == statistics.runs == 2 * N + 1
        assert statistics.succeeded == 1 and statistics.cancellations == 2 * N
        time.sleep(0.01)
        assert len(calls) == seen  # nothing runs any more
        assert torch.equal(pipe(source.xs[0]), next(pipe.map(source.xs)))


@kinds
def test_closing_the_pipe_in_the_middle_ends_it(kind: str) -> None:
    pipe = a_pipe(kind, *layers())
    with torch.no_grad():
        outputs = pipe.map(batches())
        next(outputs)
        pipe.close()
        with pytest.raises(PipeClosedError):
            for _ in outputs:
                pass
    assert pipe.statistics().in_flight == 0
    with pytest.raises(PipeClosedError):
        next(pipe.map(batches()))


@kinds
def test_a_layer_that_takes_too_long_ends_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, limits, real = threading.Event(), list[float | None](), Waiting.execute

    def execute(self: Waiting, run: Any, posting: Any, threads: Any, timeout: Any) -> None:
        limits.append(timeout)
        real(self, run, posting, threads, timeout)

    def wait(x: Tensor) -> Tensor:
        assert len(x) != 7 or gate.wait(10.0)
        return x

    xs, found = batches(), []
    xs[2] = torch.ones(7, 3, dtype=torch.float64)
    with torch.no_grad(), a_pipe(kind, *layers(Apply(wait))) as pipe:
        monkeypatch.setattr(Waiting, "execute", execute)
        with pytest.raises(PipelineTimeout):
            for y in pipe.map(xs, timeout=0.3):
                found.append(y)
        assert limits[:3] == [0.3] * 3 and not any(limits[3:])  # nobody waits behind it
        gate.set()
        assert len(found) == 2 and pipe.statistics().in_flight == 0
        while any(worker.doing for worker in pipe.statistics().workers):
            time.sleep(0.001)
        assert len(list(pipe.map(batches()))) == MANY


@kinds
def test_a_layer_that_maps_its_own_pipe_is_refused(kind: str) -> None:
    def again(x: Tensor) -> Tensor:
        list(pipe.map([x]))
        return x

    with a_pipe(kind, *layers(Apply(again))) as pipe:
        with pytest.raises(ReentrantCallError):
            pipe(batches(1)[0])


@kinds
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_of_what_was_yielded_is_held(no_gc: None, kind: str, grad: bool) -> None:
    """Neither in the middle, where only those in flight are alive, nor at the end by threads."""
    seen: list[weakref.ref[Tensor]] = []

    def made() -> Iterator[Tensor]:
        for x in batches():
            x = x.clone()
            seen.append(weakref.ref(x))
            yield x
            del x

    def note(x: Tensor) -> Tensor:
        y = x * 2
        seen.append(weakref.ref(y))
        return y

    def alive() -> int:
        settle()
        return sum(ref() is not None for ref in seen)

    with torch.set_grad_enabled(grad), a_pipe(kind, *layers(Apply(note))) as pipe:
        outputs = pipe.map(made())
        for _ in range(4):
            y = next(outputs)
        y_of_last = weakref.ref(y)
        del y
        assert y_of_last() is None and alive() <= 2 * (2 * N + 1)
        for y in outputs:
            del y
        assert len(seen) == 2 * MANY and alive() == 0
