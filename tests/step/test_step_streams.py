"""Tests copies between devices in a step, and which stream waits for which.

Stages are driven by hand, with the fake streams of ``tests/stages.py``. F[0,0] runs on ``cpu`` and
F[0,1] on ``meta``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.observe.recorder import Recording
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


def test_a_gradient_may_be_copied_before_those_of_weights_are_added_up(
    fake: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gradients, "add", lambda *_: fake.log.append("sums"))
    waits = "<copy meta 0> waits for <compute meta>"
    assert two(fake).logs["B[0,1]"] == ["B[0,1]", waits, "sums"]


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


def test_arguments_from_elsewhere_are_copied_after_what_computes_them(fake: FakeStreams) -> None:
    step = AnyModelStep(fake, [fake.layer(0, META)], [META])
    assert step.logs["F[0,0]"][:4] == [
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,0]",
    ]
