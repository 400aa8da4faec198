"""Tests a recording on CPU: it has each task once, where and when it really ran."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipert import Event, Pipe, Timeline
from pipert.skip import pop, skippable, stash
from tests.helpers.ways import CALL, Way
from tests.helpers.ways import batch as rows
from tests.helpers.ways import each_way, linear, piped, take_step
from tests.layers import Apply

M, N = 4, 3


def model() -> nn.Sequential:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    return nn.Sequential(*layers)


def pipe_of(module: nn.Sequential, n: int = N, **options: Any) -> Pipe:
    balance = [len(module) // n] * n
    return Pipe(module, balance, devices=["cpu"] * n, **{"chunks": M, **options})


def batch() -> Tensor:
    return torch.randn(2 * M, 4)


def record_step(pipe: Pipe, x: Tensor) -> Timeline:
    with pipe.record() as timeline:
        pipe(x).sum().backward()
    return timeline


def tasks(timeline: Timeline, kind: str) -> Counter[tuple[int, int]]:
    return Counter((e.micro_batch, e.partition) for e in timeline.events if e.kind == kind)


def pieces(timeline: Timeline, kind: str, i: int, j: int) -> list[Event]:
    return [e for e in timeline.events if (e.kind, e.micro_batch, e.partition) == (kind, i, j)]


def only(timeline: Timeline, kind: str, i: int, j: int) -> Event:
    (event,) = pieces(timeline, kind, i, j)
    return event


EACH_ONCE = Counter({(i, j): 1 for i in range(M) for j in range(N)})


@each_way
def test_each_task_is_recorded_once_and_the_waits_for_inputs_and_gradients(way: Way) -> None:
    module = nn.Sequential(*[nn.Sequential(linear(3, 3), nn.Tanh()) for _ in range(N)])
    with piped(module, [1] * N, way, chunks=M) as pipe, pipe.record() as timeline:
        take_step(pipe, way, rows(2 * M))
    recomputed = {"always": M, "except_last": M - 1, "never": 0}[way.checkpoint]
    again = Counter({(i, j): 1 for i, j in EACH_ONCE if i < recomputed})
    assert tasks(timeline, "forward") == EACH_ONCE and tasks(timeline, "recomputation") == again
    assert tasks(timeline, "weight gradient") == (EACH_ONCE if "zb" in way.schedule else Counter())
    waits = Counter((i, j) for i, j in EACH_ONCE if j > 0)
    assert tasks(timeline, "backward") == EACH_ONCE
    if way.schedule != CALL:  # there the waits of a backward are autograd's
        waits += Counter((i, j) for i, j in EACH_ONCE if j < N - 1)
    assert tasks(timeline, "wait") == waits


def test_one_thread_is_never_seen_at_two_backwards_at_once() -> None:
    # Branches of nodes that lead to weights alone, which are done in turns with those of others.
    module = nn.Sequential(*[Branches() for _ in range(N)])
    for _ in range(5):
        with pipe_of(module, checkpoint="never") as pipe:
            timeline = record_step(pipe, batch())
        backwards = [event for event in timeline.events if event.kind != "forward"]
        backwards = [event for event in backwards if event.kind != "wait"]
        for one, after in zip(backwards, backwards[1:], strict=False):
            assert one.end <= after.start


class Branches(nn.Module):
    """Its gradient has long ways to the weight besides the one to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.weight
        for _ in range(8):
            scale = scale.sin() + scale
        return x * scale


class InPlace(nn.Module):
    """A layer that changes its input in place, so that another node has made it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.layered  # refused where it is recomputed
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_partition_that_changes_its_input_in_place_is_recorded(checkpoint: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), InPlace(), nn.Linear(4, 4))
    with pipe_of(module, checkpoint=checkpoint) as pipe:
        timeline = record_step(pipe, batch())
    assert tasks(timeline, "backward") == EACH_ONCE


def test_work_of_the_caller_is_no_part_of_a_recorded_backward() -> None:
    order: list[str] = []
    outside = Note(lambda: order.append("outside"))(torch.ones(4, requires_grad=True))
    module = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x * outside))
    with Pipe(module, [1, 1], devices=["cpu", "cpu"], chunks=1, checkpoint="never") as pipe:
        with pipe.record() as timeline:
            y = pipe(torch.ones(2, 4)).sum()
            y.backward()
    assert order == ["outside"]
    assert set(tasks(timeline, "backward")) == {(0, 0), (0, 1)}


def test_no_backward_is_recorded_without_grad() -> None:
    with pipe_of(model()) as pipe, torch.no_grad(), pipe.record() as timeline:
        pipe(batch())
    assert {event.kind for event in timeline.events} == {"forward", "wait"}


@pytest.mark.layered  # R is inside of B
def test_tasks_are_in_the_order_of_what_they_need() -> None:
    with pipe_of(model()) as pipe:
        timeline = record_step(pipe, batch())
    for i in range(M):
        for j in range(N):
            forward, backward = (only(timeline, kind, i, j) for kind in ("forward", "backward"))
            assert forward.start <= forward.end <= backward.start <= backward.end
            if j > 0:
                assert only(timeline, "forward", i, j - 1).end <= forward.start
                assert backward.end <= only(timeline, "backward", i, j - 1).start
            if i > 0:
                assert only(timeline, "forward", i - 1, j).end <= forward.start
                assert backward.end <= only(timeline, "backward", i - 1, j).start
            if i < M - 1:
                recompute = only(timeline, "recomputation", i, j)
                assert forward.end <= recompute.start <= recompute.end <= backward.start


def test_events_say_which_run_clock_and_device() -> None:
    with pipe_of(model()) as pipe:
        pipe(batch())
        with pipe.record() as timeline:
            pipe(batch())
    event = only(timeline, "forward", 2, 1)
    assert (event.run, event.name) == (1, "F[2,1]")
    assert event.device == torch.device("cpu")


class _Noted(torch.autograd.Function):
    """A function that calls ``note`` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Any) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grads[0], None


class Note(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Noted.apply(x, self.note)  # type: ignore[no-untyped-call]
        return y


def test_a_second_backward_is_recorded_again() -> None:
    with pipe_of(model(), checkpoint="never") as pipe, pipe.record() as timeline:
        loss = pipe(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(len(pieces(timeline, "backward", i, j)) == 2 for i, j in EACH_ONCE)


def test_a_backward_that_ends_early_is_recorded_as_far_as_it_went() -> None:
    with pipe_of(model(), checkpoint="never") as pipe, pipe.record() as timeline:
        torch.autograd.grad(pipe(batch()).sum(), list(pipe.partitions[N - 1].parameters()))
    assert set(tasks(timeline, "backward")) == {(i, N - 1) for i in range(M)}


def test_backwards_that_share_a_node_do_not_overlap() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parametrize.register_parametrization(module[0], "weight", nn.Tanh())
    with Pipe(module, [2], devices=["cpu"], chunks=3, checkpoint="never") as pipe:
        with pipe.record() as timeline, parametrize.cached():
            pipe(torch.ones(3, 4)).sum().backward()
    backwards = [event for event in timeline.events if event.kind == "backward"]
    assert [event.micro_batch for event in backwards] == [2, 1, 0]
    assert all(one.end <= next.start for one, next in zip(backwards, backwards[1:], strict=False))


def test_only_calls_inside_of_the_block_are_recorded_with_their_backwards_in_it() -> None:
    with pipe_of(model()) as pipe:
        before = pipe(batch()).sum()
        with pipe.record() as timeline:
            before.backward()
            inside = pipe(batch()).sum()
        inside.backward()
        pipe(batch()).sum().backward()
    assert {event.run for event in timeline.events} == {1}
    assert {event.kind for event in timeline.events} == {"forward", "wait"}


def test_two_recordings_see_the_calls_inside_each() -> None:
    with pipe_of(model()) as pipe, pipe.record() as outer:
        pipe(batch())
        with pipe.record() as inner:
            pipe(batch())
        pipe(batch())
    assert {event.run for event in outer.events} == {0, 1, 2}
    assert {event.run for event in inner.events} == {1}


@pytest.mark.layered  # what saves nothing is recomputed by nobody
def test_a_timeline_keeps_no_tensor() -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            alive.append(weakref.ref(y))
            return y

    module = nn.Sequential(nn.Linear(4, 4), Watch(), Watch(), nn.Linear(4, 4))
    with Pipe(module, [2, 2], devices=["cpu", "cpu"], chunks=2, checkpoint="always") as pipe:
        gc.collect()
        gc.disable()
        try:
            with pipe.record() as timeline:
                pipe(torch.ones(2, 4)).sum().backward()
            assert len(alive) == 8 and not any(ref() is not None for ref in alive)
        finally:
            gc.enable()
    assert timeline.events


def test_a_timeline_does_not_keep_the_pipe() -> None:
    pipe = pipe_of(model())
    gone = weakref.ref(pipe)
    with pipe.record() as timeline:
        pipe(batch())
    del pipe
    gc.collect()
    assert gone() is None and tasks(timeline, "forward") == EACH_ONCE


def test_a_pipe_inside_of_a_layer_is_recorded_by_itself() -> None:
    inner = pipe_of(model())
    with inner, Pipe(nn.Sequential(inner), [1], devices=["cpu"], chunks=1) as outer:
        with outer.record() as of_outer, inner.record() as of_inner:
            outer(batch()).sum().backward()
    assert set(tasks(of_outer, "forward")) == {(0, 0)}
    assert tasks(of_inner, "forward") == EACH_ONCE
    assert tasks(of_inner, "backward") == EACH_ONCE


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


def stashing() -> nn.Sequential:
    layers = [nn.Linear(4, 4), Stash(), nn.Dropout(), nn.ReLU(inplace=True), Pop()]
    return nn.Sequential(*layers, nn.Linear(4, 4))


@pytest.mark.parametrize("build", [model, stashing])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_recording_changes_no_result(
    build: Any, checkpoint: str, requires_grad: bool
) -> None:
    results = []
    x = batch()
    torch.manual_seed(1)
    module = build()
    for recorded in (False, True):
        torch.manual_seed(2)
        module.zero_grad()
        leaf = x.clone().requires_grad_(requires_grad)
        with pipe_of(module, checkpoint=checkpoint) as pipe:
            if recorded:
                with pipe.record():
                    y = pipe(leaf)
                    y.square().sum().backward()
            else:
                y = pipe(leaf)
                y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]])
    for plain, of_recorded in zip(*results, strict=True):
        assert plain is None and of_recorded is None or torch.equal(plain, of_recorded)
