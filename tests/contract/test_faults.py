"""Tests R3 to R5 at many places of calls and steps: errors are raised with notes and leave nothing.

The cases are drawn by a fixed seed from phase x place x exception x checkpointing x micro-batches x
partitions x what the caller has put on x call or step. Each raises one error in one task, then
takes a step that must be the plain model's, on the same threads; of a whole step, ``.grad`` is as
it was. The collector of cycles is off: reference counting alone has to free the failed run
(pitfalls 9 and 11).
"""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

import pytest
import torch

from tests.faults.injector import Custom, Failure, Setting, surroundings, wrongs_of
from tests.helpers.failing_steps import StepSetting
from tests.helpers.ways import CALL, MODES, SCHEDULES

pytestmark = pytest.mark.usefixtures("no_gc_in_module")

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
OF_STEPS = ("loss", "before")  # in a call these are the caller's own
PHASES = (
    "scatter", "arrive", "stash", "pop", "forward", "leave", "gather", "recomputation",
    "stash in recomputation", "pop in recomputation", "backward", *OF_STEPS,
)  # fmt: skip
BOXED = ("scatter", "arrive", "leave", "gather")
A_PHASE = 70  # cases


class Case(NamedTuple):
    """A fault. ``j`` is the partition where it strikes, which is not always the one to blame."""

    phase: str
    i: int
    j: int
    kind: type[BaseException]
    checkpoint: str
    m: int
    n: int
    around: str
    how: str
    recorded: bool

    def __str__(self) -> str:
        task = f"{self.phase} [{self.i},{self.j}] of m={self.m} n={self.n}"
        seen = ", recorded" if self.recorded else ""
        return f"{self.how} {task}, {self.kind.__name__}, {self.checkpoint}, {self.around}{seen}"

    @property
    def checkpointed(self) -> bool:
        """Tells whether its micro-batch is recomputed."""
        last = self.i == self.m - 1
        return self.checkpoint == "always" or self.checkpoint == "except_last" and not last

    @property
    def possible(self) -> bool:
        in_generator = self.phase in ("stash", "stash in recomputation") or (
            self.phase.startswith("pop") and self.n == 1
        )
        if in_generator and self.kind is StopIteration:  # Python makes a RuntimeError of it there
            return False
        if self.phase.endswith("recomputation") and not self.checkpointed:
            return False
        if (self.phase in OF_STEPS or self.recorded) and self.how == CALL:
            return False
        if self.phase == "before" and self.i > 0:
            return False
        if self.phase == "scatter" and self.m == 1:  # the caller's own containers go in
            return False
        where = {
            "scatter": 0,
            "stash": 0,
            "stash in recomputation": 0,
            "pop": self.n - 1,
            "pop in recomputation": -1,
            "loss": self.n - 1,
            "before": 0,
            "gather": self.n - 1,
        }
        if self.how == CALL:
            where["arrive"] = 0  # others are reached into only if there is something to do
        return self.j == where.get(self.phase, self.j) and (self.j >= 0 or "pop" in self.phase)

    def note(self) -> str | None:
        """Returns the beginning of the error's note; ``None`` if any notes are allowed."""
        task = f"[{self.i},{self.j}]: partition {self.j} on cpu"
        whole = f", micro-batch {self.i} of {self.m}"
        layer = f", layer '{self.j}' (Layer)"
        notes = {
            "forward": f"in forward F{task}{layer}{whole}",
            "loss": f"in forward F{task}, loss_fn{whole}",
            "recomputation": f"in recomputation R{task}{layer}{whole}",
            "stash": f"in forward F{task}, layer '0' (Stash){whole}",
            "stash in recomputation": f"in recomputation R{task}, layer '0' (Stash){whole}",
        }
        if self.how != CALL:
            notes["backward"] = f"in backward B{task}{whole}"
        return notes.get(self.phase)

    def setting(self) -> Setting:
        """Makes a pipe whose site is armed for this case."""
        skips = "stash" in self.phase or "pop" in self.phase
        options = self.n, self.m, self.checkpoint, skips, self.phase in BOXED
        in_call = self.how == CALL
        made = Setting(*options) if in_call else StepSetting(self.how, self.recorded, *options)
        made.site.arm(self.phase, self.i, self.j, self.kind("a fault"))
        return made


@functools.cache
def cases_of(phase: str) -> list[Case]:
    """Draws cases of one phase, so that every kind and every mode occurs."""
    every = [
        Case(phase, i, j, kind, checkpoint, m, n, around, how, recorded)
        for kind in KINDS
        for checkpoint in MODES
        for m in (1, 2, 4)
        for n in (1, 2, 3)
        for i in range(m)
        for j in range(-1, n)
        for around in AROUND
        for how in (CALL, *SCHEDULES)
        for recorded in (False, True)
    ]
    possible = [case for case in every if case.possible]
    return random.Random(f"faults, {phase}").sample(possible, A_PHASE)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "case",
    # One partition without cuts is one layer; values are flattened inside of others, the input
    # where a layer is recomputed, and outputs where several are joined.
    [
        pytest.param(
            case,
            marks=[pytest.mark.layered]
            if case.n == 1
            or "leave" in case.phase
            or (case.phase, case.j) == ("arrive", 0)
            or (case.phase, case.m) == ("gather", 1)
            else [],
        )
        for phase in PHASES
        for case in cases_of(phase)
    ],
    ids=str,
)
def test_a_fault_is_raised_unchanged_and_the_next_step_is_right(
    case: Case,
) -> None:
    setting = case.setting()

    def run() -> None:
        with surroundings(case.around):
            setting.step()

    with setting.pipe:
        assert wrongs_of(setting, run, case.note()) == []


def test_the_drawing_has_every_exception_mode_and_way_in_every_phase() -> None:
    for phase in PHASES:
        drawn = cases_of(phase)
        assert set(KINDS) - {case.kind for case in drawn} <= {StopIteration}, phase
        modes = 2 if phase.endswith("recomputation") else 3
        assert len({case.checkpoint for case in drawn}) == modes, phase
        assert len({case.how for case in drawn}) == (2 if phase in OF_STEPS else 3), phase
