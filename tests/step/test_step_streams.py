"""Tests copies between devices in a step, and which stream waits for which.

Stages are driven by hand, with the fake streams of ``tests/stages.py``. F[0,0] runs on ``cpu`` and
F[0,1] on ``meta``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.observe.event import COPY
from pipert.observe.recorder import Recording
from pipert.skip import Skippable, pop, skippable, stash
from pipert.stage.gradients import Gradients
from pipert.stage.loss import Loss
from pipert.stage.step import Step
from tests.stages import CPU, META, Driven, FakeStreams


@pytest.fixture(scope="module")
def meta() -> None:
    """Runs a first operation on the meta device, whose many imports no test should pay for."""
    x = torch.ones(2, device=META, requires_grad=True)
    torch.autograd.backward((torch.zeros_like(x, device=META) * x).clone().sum())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, meta: None) -> FakeStreams:
    return FakeStreams(monkeypatch)


class AnyModelStep(Driven):
    """One micro-batch of a step, with a log of each action's stream operations."""

    def __init__(
        self,
        fake: FakeStreams,
        layers: Sequence[nn.Module],
        devices: Sequence[torch.device],
        recomputed: int = 0,
        recording: Recording | None = None,
        target: Any = None,
    ) -> None:
        x = torch.ones(2, requires_grad=True)
        self.step = Step(Loss(lambda y, _: y.sum(), [target], [1.0], 1.0))
        partitions = [[layer] for layer in layers]
        super().__init__(partitions, [x], devices, recomputed, fake, recording, self.step)
        self.log = fake.log
        self.logs: dict[str, list[str]] = {}
        for action in self.plan:
            self.log.clear()
            self.do(action)
            self.logs[str(action)] = list(self.log)
        error = self.outcome.take_error()
        if error is not None:
            raise error

    def sums(self, j: int) -> list[Tensor]:
        """Returns the gradients of the weights of stage ``j``."""
        cut = self.stages[j].cut
        assert cut is not None
        return [total for _, total in cut.gradients.take()]


def two(fake: FakeStreams, **options: Any) -> AnyModelStep:
    return AnyModelStep(fake, [fake.layer(0, CPU), fake.layer(1, META)], [CPU, META], **options)


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


def test_gradients_are_on_the_devices_of_their_tensors(fake: FakeStreams) -> None:
    step = two(fake)
    devices = [[dw.device for dw in step.sums(j)] for j in range(2)]
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


def test_copies_of_gradients_are_recorded_with_their_origin(fake: FakeStreams) -> None:
    recording = Recording([CPU, META])
    two(fake, recording=recording)
    there, back = (event for event in recording.events() if event.kind == COPY)
    assert (there.partition, there.origin, there.device, there.source) == (1, 0, META, CPU)
    assert (back.partition, back.origin, back.device, back.source) == (0, 1, CPU, META)
    assert there.bytes == back.bytes == 8


def test_arguments_from_elsewhere_are_copied_after_what_computes_them(fake: FakeStreams) -> None:
    step = AnyModelStep(fake, [fake.layer(0, META)], [META])
    assert step.logs["F[0,0]"][:4] == [
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


def three(fake: FakeStreams) -> AnyModelStep:
    return AnyModelStep(fake, [Stash(), fake.layer(1, META), Pop()], [CPU, META, META])


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
    assert repr(step.run.skips) == "<SkipLinks, 0 skips and 0 gradients>"
    assert len(step.sums(0)) == 1
