"""Is an error in a layer raised with its place, and does the pipe work afterwards?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert.check.finding import Finding, judged
from pipert.check.values import difference, gradients
from pipert.check.ways import CALL, Devices, Way, step
from pipert.pipe import Pipe

__all__: list[str] = []

CHUNKS = 4
AT = 2  # the micro-batch that fails
MEANS = "a layer that fails leaves you without its place, or with a pipe that cannot be used"


class _OnPurposeError(Exception):
    """The error that the layer raises."""


class _Failing(nn.Module):
    """Fails in the forward or the backward of micro-batch ``AT`` when armed."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.calls = 0

    def arm(self, phase: str) -> None:
        """Fail in ``phase`` from now on; never if it is empty."""
        self.phase, self.calls = phase, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.phase or self.calls != AT + 1:
            return x
        if self.phase == "forward":
            raise _OnPurposeError
        failing: Tensor = _FailInBackward.apply(x)  # type: ignore[no-untyped-call]
        return failing


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise _OnPurposeError


def check_errors(devices: Devices) -> Iterator[Finding]:
    """Provoke a failure in each phase of the last partition; each next step must be right."""
    torch.manual_seed(0)
    failing = _Failing()
    others = devices.n - 1
    layers = [nn.Linear(8, 8) for _ in range(others)]
    module = nn.Sequential(*layers, nn.Linear(8, 8), failing, nn.Linear(8, 1))
    x = torch.randn(2 * CHUNKS, 8).to(devices.partitions[0])
    target = torch.randn(2 * CHUNKS, 1)
    faults = []
    with devices.pipe(module, [1] * others + [3], CHUNKS) as pipe:
        before = _works(pipe, x, target)
        for schedule, phase in ((CALL, "forward"), ("1f1b", "forward"), ("1f1b", "backward")):
            failing.arm(phase)
            fault = _provoke(pipe, Way(schedule, "never"), phase, x, target)
            failing.arm("")
            amount, name = difference(_works(pipe, x, target), before)
            if fault is None and amount > 1e-3:
                fault = f"afterwards {name} is wrong by {amount:.1e}"
            if fault is not None:
                faults.append(f"an error in the {phase} with {schedule}: {fault}")
    seen = "in the forward of a call, in both phases of a step: with its place, and usable after"
    yield judged("errors of layers", faults, seen, MEANS)


def _works(pipe: Pipe, x: Tensor, target: Tensor) -> dict[str, Tensor | None]:
    pipe.zero_grad()
    loss, _ = step(pipe, Way(CALL, "except_last"), x, target, mse_loss)
    found = {k: g if g is None else g.clone() for k, g in gradients(pipe, x).items()}
    return {"loss": loss, **found}


def _provoke(pipe: Pipe, way: Way, phase: str, x: Tensor, target: Tensor) -> str | None:
    """Returns what is wrong with how the error is raised, if anything."""
    n = len(pipe.partitions)
    try:
        step(pipe, way, x, target, mse_loss)
    except _OnPurposeError as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        expected = (phase, f"partition {n - 1}", f"micro-batch {AT} of {CHUNKS}")
        missing = [words for words in expected if words not in notes]
        return f"its note lacks {', '.join(missing)}" if missing else None
    return "it did not come out"
