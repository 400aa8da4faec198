"""Tests how ``pipe.map`` ends: errors, closing, time limits, and what is left behind."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import PipeClosedError, PipelineTimeout, ReentrantCallError
from pipert.engine.waiting import Waiting
from tests.layers import Apply
from tests.mapped import MANY, N, Source, a_pipe, batches, kinds, layers
from tests.settling import settle


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
