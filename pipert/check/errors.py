"""Is an error in a layer raised with its place, and does the pipe work afterwards?"""

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
AT = 2  # the micro-batch that fails
MEANS = "a layer that fails leaves you without its place, or with a pipe that cannot be used"


class _OnPurposeError(Exception):
    """The error that the layer raises."""


class _Failing(nn.Module):
    """Fails in the ``phase`` of micro-batch ``AT``, if that is set."""

    phase = ""
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls != AT + 1 or not self.phase:
            return x
        if self.phase == "forward":
            _fail()
        x = x.view_as(x)
        x.register_hook(_fail)  # type: ignore[no-untyped-call]
        return x


def _fail(*_: Tensor) -> None:
    raise _OnPurposeError


def check(devices: Devices) -> Iterator[Finding]:
    """Provoke a failure in each phase of the last partition; each next step must be right."""
    torch.manual_seed(0)
    failing, n = _Failing(), devices.n
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)], failing)  # in the last partition
    x, target = torch.randn(2 * CHUNKS, 8), torch.randn(2 * CHUNKS, 8)
    faults = []
    with devices.trial(Model("", layers, x, target, mse_loss, CHUNKS)) as trial:
        usual = Way(CALL, "except_last")
        before = trial.results(usual)
        for schedule, phase in ((CALL, "forward"), ("1f1b", "forward"), ("1f1b", "backward")):
            failing.phase, failing.calls = phase, 0
            fault = "it did not come out"
            try:
                trial.step(Way(schedule, "never"))
            except _OnPurposeError as error:
                notes = " ".join(getattr(error, "__notes__", ()))
                place = (phase, f"partition {n - 1}", f"micro-batch {AT} of {CHUNKS}")
                missing = ", ".join(words for words in place if words not in notes)
                fault = missing and f"its note lacks {missing}"
            failing.phase = ""
            amount, name = difference(trial.results(usual), before)
            if not fault and amount > 1e-3:
                fault = f"afterwards {name} is wrong by {amount:.1e}"
            if fault:
                faults.append(f"an error in the {phase} with {schedule}: {fault}")
    seen = "in the forward of a call, in both phases of a step: with its place, and usable after"
    yield judged("errors of layers", faults, seen, MEANS)
