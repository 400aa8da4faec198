"""Checks that an error in a layer is raised with its place, and that the pipe works afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert.check.finding import Finding, judged
from pipert.check.models import Model
from pipert.check.values import difference
from pipert.check.ways import CALL, Devices, Way

__all__: list[str] = []

CHUNKS = 4
FAILING = 2  # the micro-batch
MEANS = "a layer that fails leaves you without its place, or with a pipe that cannot be used"


class _DeliberateError(Exception):
    """The error that the failing layer raises."""


class _Failing(nn.Module):
    """A layer that fails on micro-batch ``FAILING`` in ``phase``; never if that is empty."""

    phase = ""
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls != FAILING + 1 or not self.phase:
            return x
        if self.phase == "forward":
            _fail()
        x = x.view_as(x)
        x.register_hook(_fail)  # type: ignore[no-untyped-call]
        return x


def _fail(*_: Tensor) -> None:
    raise _DeliberateError


def check(devices: Devices) -> Iterator[Finding]:
    """Provoke failures in the last partition; after each the next step must be right."""
    torch.manual_seed(0)
    failing, n = _Failing(), devices.n
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)], failing)  # in the last partition
    x, target = torch.randn(2 * CHUNKS, 8), torch.randn(2 * CHUNKS, 8)
    faults = []
    with devices.trial(Model("", layers, x, target, mse_loss, CHUNKS)) as trial:
        call = Way(CALL, "except_last")
        expected = trial.results(call)
        for schedule, phase in ((CALL, "forward"), ("1f1b", "forward"), ("1f1b", "backward")):
            failing.phase, failing.calls = phase, 0
            fault = "it did not come out"
            try:
                trial.step(Way(schedule, "never"))
            except _DeliberateError as error:
                notes = " ".join(getattr(error, "__notes__", ()))
                place = (phase, f"partition {n - 1}", f"micro-batch {FAILING} of {CHUNKS}")
                missing = ", ".join(words for words in place if words not in notes)
                fault = missing and f"its note lacks {missing}"
            failing.phase = ""
            amount, name = difference(trial.results(call), expected)
            if not fault and amount > 1e-3:
                fault = f"afterwards {name} is wrong by {amount:.1e}"
            if fault:
                faults.append(f"an error in the {phase} with {schedule}: {fault}")
    seen = "in the forward of a call, in both phases of a step: with its place, and usable after"
    yield judged("errors of layers", faults, seen, MEANS)
