"""R3 to R5 of a whole step: what fails is raised with its note, and ``.grad`` is as it was.

The first test is for many places, drawn by a fixed seed as in ``tests/faults/test_injector.py``.
Each case raises one error in one task, then takes a step that must be the plain model's, on the
same threads. The collector of cycles is off.
"""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

import pytest
import torch

from tests.faults.injector import Custom, Failure, surroundings, wrongs_of
from tests.step.faulty import StepSetting

pytestmark = pytest.mark.usefixtures("no_gc_in_module")

MODES = ("always", "except_last", "never")
KINDS: tuple[type[BaseException], ...] = (
    Failure,
    Custom,
    KeyboardInterrupt,
    SystemExit,
    StopIteration,
    MemoryError,
    torch.OutOfMemoryError,
)
AROUND = ("nothing", "autocast", "saved-tensor hooks", "default device")
PHASES = (
    "scatter", "arrive", "stash", "pop", "forward", "leave", "loss", "recomputation",
    "stash in recomputation", "pop in recomputation", "backward", "before", "gather",
)  # fmt: skip
BOXED = ("scatter", "arrive", "leave", "gather")
A_PHASE = 24  # cases


class Case(NamedTuple):
    """One fault."""

    phase: str
    i: int
    j: int
    kind: type[BaseException]
    checkpoint: str
    m: int
    n: int
    around: str
    schedule: str
    recorded: bool

    def __str__(self) -> str:
        task = f"{self.phase} [{self.i},{self.j}] of m={self.m} n={self.n} {self.schedule}"
        seen = ", recorded" if self.recorded else ""
        return f"{task}, {self.kind.__name__}, {self.checkpoint}, {self.around}{seen}"

    @property
    def possible(self) -> bool:
        generators = ("stash", "stash in recomputation")
        of_one = self.phase.startswith("pop") and self.n == 1
        if self.kind is StopIteration and (self.phase in generators or of_one):
            return False  # Python makes a RuntimeError of it there
        last = self.i == self.m - 1
        checkpointed = self.checkpoint == "always" or self.checkpoint == "except_last" and not last
        if self.phase.endswith("recomputation") and not checkpointed:
            return False
        if self.phase == "before" and self.i > 0:
            return False
        where = {
            "scatter": 0,
            "stash": 0,
            "stash in recomputation": 0,
            "pop": self.n - 1,
            "pop in recomputation": -1,
            "loss": self.n - 1,
            "gather": self.n - 1,
            "before": 0,
        }
        return self.j == where.get(self.phase, self.j) and (self.j >= 0 or "pop" in self.phase)

    def note(self) -> str | None:
        """How the only note of the error begins; ``None`` where there may be any."""
        task = f"[{self.i},{self.j}]: partition {self.j} on cpu"
        whole = f", micro-batch {self.i} of {self.m}"
        layer = f", layer '{self.j}' (Layer)"
        notes = {
            "forward": f"in forward F{task}{layer}{whole}",
            "loss": f"in forward F{task}{whole}",
            "recomputation": f"in recomputation R{task}{layer}{whole}",
            "stash": f"in forward F{task}, layer '0' (Stash){whole}",
            "stash in recomputation": f"in recomputation R{task}, layer '0' (Stash){whole}",
            "backward": f"in backward B{task}{whole}",
        }
        return notes.get(self.phase)


@functools.cache
def cases_of(phase: str) -> list[Case]:
    """A drawing of the possible cases of one phase."""
    every = [
        Case(phase, i, j, kind, checkpoint, m, n, around, schedule, recorded)
        for kind in KINDS
        for checkpoint in MODES
        for m in (1, 2, 4)
        for n in (1, 2, 3)
        for i in range(m)
        for j in range(-1, n)
        for around in AROUND
        for schedule in ("gpipe", "1f1b")
        for recorded in (False, True)
    ]
    possible = [case for case in every if case.possible]
    return random.Random(f"faults of steps, {phase}").sample(possible, A_PHASE)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "case", [case for phase in PHASES for case in cases_of(phase)], ids=lambda case: str(case)
)
def test_a_fault_is_raised_as_it_is_and_no_gradient_has_changed(case: Case) -> None:
    skips = "stash" in case.phase or "pop" in case.phase
    setting = StepSetting(
        case.schedule, case.recorded,
        case.n, case.m, case.checkpoint, skips, case.phase in BOXED,
    )  # fmt: skip
    setting.site.arm(case.phase, case.i, case.j, case.kind("a fault"))

    def run() -> None:
        with surroundings(case.around):
            setting.step()

    with setting.pipe:
        assert wrongs_of(setting, run, case.note()) == []


def test_the_drawing_has_every_exception_and_mode_in_every_phase() -> None:
    for phase in PHASES:
        drawn = cases_of(phase)
        assert set(KINDS) - {case.kind for case in drawn} <= {StopIteration}, phase
        modes = 2 if phase.endswith("recomputation") else 3
        assert len({case.checkpoint for case in drawn}) == modes, phase
