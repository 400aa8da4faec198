"""Copies between devices in a step: what is copied, and what waits for what.

Lanes are driven by hand, with the fake streams of ``tests/lanes.py``. F[0,0] runs on ``cpu`` and
F[0,1] on ``meta``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pipert.autograd.streams import CopyStreams
from pipert.queues.closable import ClosableQueue
from pipert.schedules import plan
from pipert.schedules.clock_cycle import Schedule
from pipert.seeing.event import COPY
from pipert.seeing.ledger import Ledger
from pipert.seeing.recorder import Recording
from pipert.skip import Skippable, pop, skippable, stash
from pipert.skip.routes import routes
from pipert.stage.gradients import Gradients
from pipert.stage.outcome import NOT_RUN
from pipert.stage.recorded_lane import RecordedStepLane
from pipert.stage.run import Run
from pipert.stage.step import Loss, Step
from pipert.stage.step_lane import StepLane, leaf_inputs
from pipert.workers.activity import Activity, Seat
from pipert.workers.context import CallerContext
from pipert.workers.turn import Turn
from tests.lanes import CPU, META, FakeStreams


@pytest.fixture(scope="module")
def meta() -> None:
    """The first operation on the meta device imports a lot; let no test pay for that."""
    x = torch.ones(2, device=META, requires_grad=True)
    torch.autograd.backward((torch.zeros_like(x, device=META) * x).clone().sum())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, meta: None) -> FakeStreams:
    return FakeStreams(monkeypatch)


class DrivenStep:
    """One micro-batch of a step, whose lanes are made and driven by hand."""

    def __init__(
        self,
        fake: FakeStreams,
        layers: Sequence[nn.Module],
        devices: Sequence[torch.device],
        x: Tensor,
        recomputed: int = 0,
        recording: Recording | None = None,
        target: Any = None,
    ) -> None:
        n = len(layers)
        ledger = Ledger()
        if recording is not None:
            ledger.start_recording(recording)
        self.planned = plan("1f1b", 1, n, None, recomputed)
        self.step = Step(self.planned, Loss(lambda y, _: y.sum(), [target], [1.0], 1.0))
        self.run = Run(
            Schedule(1, n), recomputed, devices, CallerContext(), cast(CopyStreams, fake),
            ledger.open(1, n), posted=self.planned,
        )  # fmt: skip
        there: list[ClosableQueue[Any]] = [ClosableQueue() for _ in range(n - 1)]
        back: list[ClosableQueue[Any]] = [ClosableQueue() for _ in range(n - 1)]
        partitions = [nn.Sequential(layer) for layer in layers]
        skips = routes(partitions)
        kind = StepLane if recording is None else RecordedStepLane
        self.lanes = [
            kind(
                self.step,
                back[j] if j < n - 1 else None,
                back[j - 1].put if j > 0 else _nobody,
                self.run, j, partitions[j], skips[j], (), None,
                there[j - 1] if j > 0 else [leaf_inputs(x)],
                there[j].put if j < n - 1 else _nobody,
            )
            for j in range(n)
        ]  # fmt: skip
        self.log = fake.log
        self.logs: dict[str, list[str]] = {}

    def go(self) -> DrivenStep:
        """Do all tasks in the order of the schedule, and note what each asks of streams."""
        seat = Seat(Turn(threading.Lock()), Activity())
        for task in self.planned:
            self.log.clear()
            self.lanes[task.j].perform(task, seat)
            self.logs[str(task)] = list(self.log)
        error = self.run.progress.take_error()
        if error is not None:
            raise error
        return self


def _nobody(value: Any) -> None:
    assert value is None or value is not NOT_RUN


def two(fake: FakeStreams, **options: Any) -> DrivenStep:
    layers = [fake.layer(0, CPU), fake.layer(1, META)]
    x = torch.ones(2, requires_grad=True)
    return DrivenStep(fake, layers, [CPU, META], x, **options).go()


def test_a_forward_lets_the_copy_wait_for_compute(fake: FakeStreams) -> None:
    assert two(fake).logs["F[0,0]"] == ["F[0,0]", "<copy cpu 0> waits for <compute cpu>"]


def test_the_next_forward_computes_after_the_copy(fake: FakeStreams) -> None:
    assert two(fake).logs["F[0,1]"] == [
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,1]",
        "<copy meta 0> waits for <compute meta>",
    ]


def test_a_backward_lets_the_copy_of_its_gradient_wait_for_compute(fake: FakeStreams) -> None:
    assert two(fake).logs["B[0,1]"] == ["B[0,1]", "<copy meta 0> waits for <compute meta>"]


def test_a_gradient_may_be_copied_before_those_of_weights_are_added_up(
    fake: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gradients, "add", lambda *_: fake.log.append("sums"))
    waits = "<copy meta 0> waits for <compute meta>"
    assert two(fake).logs["B[0,1]"] == ["B[0,1]", waits, "sums"]


def test_the_next_backward_computes_after_the_copy_of_its_gradient(fake: FakeStreams) -> None:
    assert two(fake).logs["B[0,0]"] == [
        "copy from <copy meta 0> to <copy cpu 0>",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
        "<copy cpu 0> waits for <compute cpu>",
    ]


def test_a_recomputation_asks_nothing_of_streams(fake: FakeStreams) -> None:
    logs = two(fake, recomputed=1).logs
    assert (logs["R[0,0]"], logs["R[0,1]"]) == (["R[0,0]"], ["R[0,1]"])


def test_gradients_are_on_the_devices_of_what_they_are_of(fake: FakeStreams) -> None:
    step = two(fake)
    devices = [[dw.device for dw in lane.gradients.sums.values()] for lane in step.lanes]
    assert devices == [[CPU], [META]]
    (dx,) = step.step.input_gradients[0]
    assert dx is not None and dx.device == CPU


def test_a_target_is_copied_to_the_last_device_before_the_loss(fake: FakeStreams) -> None:
    step = two(fake, target=torch.ones(2))
    assert step.logs["F[0,1]"][3:] == [
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "<copy meta 0> waits for <compute meta>",
    ]


def test_copies_of_gradients_are_recorded_with_where_they_come_from(fake: FakeStreams) -> None:
    recording = Recording([CPU, META])
    two(fake, recording=recording)
    there, back = (event for event in recording.events() if event.kind == COPY)
    assert (there.j, there.origin, there.device, there.source, there.bytes) == (1, 0, META, CPU, 8)
    assert (back.j, back.origin, back.device, back.source, back.bytes) == (0, 1, CPU, META, 8)


def test_arguments_from_elsewhere_are_copied_after_what_computes_them(fake: FakeStreams) -> None:
    step = DrivenStep(fake, [fake.layer(0, META)], [META], torch.ones(2, requires_grad=True))
    assert step.go().logs["F[0,0]"][:4] == [
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,0]",
    ]


# Skips --------------------------------------------------------------------------------------------


@skippable(stash=["skip"])
class Stash(Skippable):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x * self.weight)
        return x


@skippable(pop=["skip"])
class Pop(Skippable):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


def three(fake: FakeStreams) -> DrivenStep:
    layers = [Stash(), fake.layer(1, META), Pop()]
    return DrivenStep(fake, layers, [CPU, META, META], torch.ones(2, requires_grad=True)).go()


def test_a_skip_is_copied_straight_to_the_device_where_it_is_popped(fake: FakeStreams) -> None:
    step = three(fake)
    assert [line for line, _ in groupby(step.logs["F[0,2]"])] == [  # the value waits, too
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "<copy meta 0> waits for <compute meta>",
    ]


def test_the_gradient_of_a_skip_goes_straight_back(fake: FakeStreams) -> None:
    step = three(fake)
    assert step.logs["B[0,2]"] == ["<copy meta 0> waits for <compute meta>"]
    # That of the value, and that of the skip.
    assert step.logs["B[0,0]"][:4] == [
        "copy from <copy meta 0> to <copy cpu 0>",
        "<compute cpu> waits for <copy cpu 0>",
    ] * 2
    assert step.step.skip_gradients == {}
    assert len(step.lanes[0].gradients.sums) == 1
