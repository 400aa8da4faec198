"""Tests in the virtual time of simulated GPUs that copies run on streams of their own.

Each partition computes for 1000 us, forward and backward, and each copy of a micro-batch takes 500.
On streams of their own copies are hidden: with ``m`` micro-batches and ``n`` partitions a pass
takes ``m + n - 1`` times 1000 us and ``n - 1`` times 500. On any stream that computes it takes
longer, to the microsecond and each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Event, Pipe
from pipert.observe.event import COPY, RECOMPUTE, WAIT
from pipert.observe.timeline import Timeline
from tests import simulated_gpus
from tests.any_model.any_model_pipe import AnyModelPipe
from tests.helpers.skip_layers import popping, stashing
from tests.simulated_gpus.simulation import Simulation

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

COMPUTE, MOVE = 1000.0, 500.0  # us
M, N = 4, 3
SIZE = 125_000  # values of 4 bytes in a micro-batch, at 1 GB/s
PASS = (M + N - 1) * COMPUTE + (N - 1) * MOVE


@pytest.fixture
def gpus() -> Iterator[Simulation]:
    gpus = simulated_gpus.running()
    if gpus is None:
        pytest.skip("asks the simulation for its virtual time")
    gpus.rates(launch_us=0.0, memory_gbps=1e9, link_gbps=1.0, tflops=1e9)
    yield gpus
    gpus.rates(launch_us=5.0, memory_gbps=1000.0, link_gbps=25.0, tflops=20.0)


def compute() -> None:
    """Keeps the current stream busy for as long as a partition computes."""
    sleep_for_cycles: Any = torch.cuda._sleep
    sleep_for_cycles(int(2000 * COMPUTE))


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        compute()
        ctx.save_for_backward(x)  # what is not needed is not recomputed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        compute()
        dx: Tensor = grads[0] + x
        return dx


class Busy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Busy.apply(x)  # type: ignore[no-untyped-call]
        return y


def busy_pipe(devices: list[str], **options: Any) -> Pipe:
    layers = [Busy() for _ in devices]
    return Pipe(nn.Sequential(*layers), [1] * len(devices), devices=devices, chunks=M, **options)


def batch(device: str = "cuda:0", grad: bool = True) -> Tensor:
    return torch.ones(M, SIZE, device=device, requires_grad=grad)


@pytest.fixture
def pipe(gpus: Simulation) -> Iterator[Pipe]:
    with busy_pipe([f"cuda:{k}" for k in range(N)], checkpoint="never") as pipe:
        yield pipe


def test_copies_of_a_forward_and_of_its_backward_are_hidden(gpus: Simulation, pipe: Pipe) -> None:
    x = batch()
    gpus.reset_time()
    y = pipe(x)
    torch.cuda.synchronize(N - 1)
    assert gpus.makespan() == pytest.approx(PASS, abs=1)
    y.sum().backward()
    assert gpus.makespan() == pytest.approx(2 * PASS, abs=1)


def test_copies_of_a_step_are_hidden(gpus: Simulation, pipe: Pipe) -> None:
    x = batch()
    gpus.reset_time()
    pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), schedule="gpipe")
    assert gpus.makespan() == pytest.approx(2 * PASS, abs=1)


@pytest.mark.parametrize("kind", [Pipe, AnyModelPipe])
def test_a_recomputation_does_not_wait_for_the_copy_of_the_gradient(
    gpus: Simulation, kind: type[Any]
) -> None:
    """``R[0,0]`` runs before ``B[0,0]``, while the gradient is being copied."""
    module = nn.Sequential(Busy(), Busy())
    with kind(module, [1, 1], devices=["cuda:0", "cuda:1"], checkpoint="always") as pipe:
        x = batch()
        gpus.reset_time()
        pipe(x).sum().backward()
        moves = 2 * M * MOVE
        assert gpus.makespan() == pytest.approx(5 * COMPUTE + moves, abs=1)


# Blocking -----------------------------------------------------------------------------------------


def test_between_gpus_the_host_waits_for_nothing(gpus: Simulation, pipe: Pipe) -> None:
    x = batch()
    before = gpus.counts()["synchronisations"]
    pipe(x).sum().backward()
    assert gpus.counts()["synchronisations"] == before


def test_the_host_waits_for_each_copy_to_the_cpu(gpus: Simulation) -> None:
    x = batch(grad=False)
    with busy_pipe(["cuda:0", "cpu"]) as pipe:
        before = gpus.counts()["synchronisations"]
        pipe(x)
        assert gpus.counts()["synchronisations"] >= before + M


# Recording ----------------------------------------------------------------------------------------


def train_by_call(pipe: Pipe, x: Tensor) -> None:
    pipe(x).sum().backward()


def train_by_step(pipe: Pipe, x: Tensor) -> None:
    pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), schedule="gpipe")


Train = Callable[[Pipe, Tensor], None]
ways = pytest.mark.parametrize("train", [train_by_call, train_by_step])


def microseconds(events: Iterable[Event]) -> dict[tuple[int, int, int | None], int]:
    """Returns the duration of each, by micro-batch, partition and origin."""
    return {(e.micro_batch, e.partition, e.origin): round(1e6 * e.seconds) for e in events}


def of(timeline: Timeline, *kinds: str) -> list[Event]:
    return [event for event in timeline.events if event.kind in kinds]


@ways
@pytest.mark.parametrize("kind", [Pipe, AnyModelPipe])
def test_tasks_and_copies_are_recorded_by_the_device_s_clock(
    gpus: Simulation, kind: type[Any], train: Train
) -> None:
    module, devices = nn.Sequential(*[Busy() for _ in range(N)]), [f"cuda:{k}" for k in range(N)]
    with kind(module, [1] * N, devices=devices, chunks=M, checkpoint="never") as pipe:
        with pipe.record() as timeline:
            train(pipe, batch())
    for device in timeline.report().devices:  # a task of any model waits inside
        each = 1e6 * device.forward / M, 1e6 * device.backward / M
        assert each == (pytest.approx(COMPUTE), pytest.approx(COMPUTE))
    assert microseconds(of(timeline, COPY)) == {
        (i, k, origin): MOVE for i in range(M) for k, origin in [(1, 0), (2, 1), (0, 1), (1, 2)]
    }


# Before its first task a partition waits for all that comes before. In a call autograd has let it
# wait for the partition behind it already, and what is left is the copy.
WAITS_BACK: dict[Train, tuple[float, float]] = {
    train_by_call: (MOVE, MOVE),
    train_by_step: (2 * (COMPUTE + MOVE), 4 * (COMPUTE + MOVE)),
}


@pytest.mark.layered  # any model waits for its copies at their first use
@ways
def test_waits_are_recorded_by_the_device_s_clock(pipe: Pipe, train: Train) -> None:
    with pipe.record() as timeline:
        train(pipe, batch())
    waits = of(timeline, WAIT)
    took = sorted((e.micro_batch, e.partition, round(1e6 * e.seconds)) for e in waits)
    took = [wait for wait in took if wait[2]]
    first, second = WAITS_BACK[train]
    there = [(0, 1, COMPUTE + MOVE), (0, 2, 2 * (COMPUTE + MOVE))]
    assert len(waits) == 4 * M
    assert took == sorted([*there, (M - 1, 1, first), (M - 1, 0, second)])


def test_recomputations_are_recorded_by_the_device_s_clock(gpus: Simulation) -> None:
    with busy_pipe(["cuda:1", "cuda:0"], checkpoint="always") as pipe:
        with pipe.record() as timeline:
            # From where it is used: autograd would wait for the copy of its gradient meanwhile.
            train_by_call(pipe, batch("cuda:1"))
    assert set(microseconds(of(timeline, RECOMPUTE)).values()) == {COMPUTE}


def test_a_recording_begins_when_all_streams_are_idle(pipe: Pipe) -> None:
    """Memory written by another stream may then be written again without another wait."""
    other: Any = torch.cuda.Stream("cuda:1")  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        x = torch.ones(4, device="cuda:1")
    with pipe.record():
        x += 1


def test_a_recording_waits_for_the_events_it_begins_with(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their time on the host's clock is read around this wait."""
    waited: list[torch.cuda.Event] = []
    synchronize: Any = torch.cuda.Event.synchronize

    def note(event: torch.cuda.Event) -> None:
        waited.append(event)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", note)
    with pipe.record():
        assert len(waited) == N


def test_copies_that_follow_each_other_on_a_stream_are_recorded_one_by_one(
    gpus: Simulation,
) -> None:
    """The second one begins when the first one has ended, not when both were launched."""
    first = stashing(make=Busy(), after=Busy())
    last = popping(take=lambda x, skip: Busy()(x) + Busy()(skip))
    devices = ["cuda:0", "cuda:1"]
    with Pipe(nn.Sequential(first, last), [1, 1], devices=devices, chunks=M) as pipe:
        with pipe.record() as timeline:
            train_by_call(pipe, batch())
    copies = of(timeline, COPY)
    assert len(copies) == 4 * M
    assert {round(1e6 * event.seconds) for event in copies} == {MOVE}
