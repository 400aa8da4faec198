"""R3 to R5 at about 500 places: the failure is raised with its note, and nothing of it is left.

The cases are drawn by a fixed seed from phase x place x exception x checkpointing x micro-batches x
partitions x what the caller has put on. Each raises one error in one task, then takes a step that
must be the plain model's, on the same threads. The collector of cycles is off: reference counting
alone has to free the failed run.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from tests.faults.injector import Custom, Failure, Setting, surroundings, wrongs_of

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
    "scatter", "arrive", "stash", "pop", "forward", "leave", "gather",
    "recomputation", "stash in recomputation", "pop in recomputation", "backward",
)  # fmt: skip
BOXED = ("scatter", "arrive", "leave", "gather")
A_PHASE = 46  # cases


class Case(NamedTuple):
    """One fault. ``j`` is where it strikes, not always the partition that is to blame."""

    phase: str
    i: int
    j: int
    kind: type[BaseException]
    checkpoint: str
    m: int
    n: int
    around: str

    def __str__(self) -> str:
        task = f"{self.phase} [{self.i},{self.j}] of m={self.m} n={self.n}"
        return f"{task}, {self.kind.__name__}, {self.checkpoint}, {self.around}"

    @property
    def checkpointed(self) -> bool:
        """Whether its micro-batch is recomputed."""
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
        where = {
            "scatter": 0,
            "arrive": 0,  # others are reached into only if there is something to do
            "stash": 0,
            "stash in recomputation": 0,
            "pop": self.n - 1,
            "pop in recomputation": -1,
            "gather": self.n - 1,
        }
        return self.j == where.get(self.phase, self.j) and (self.j >= 0 or "pop" in self.phase)


@functools.cache
def cases_of(phase: str) -> list[Case]:
    """A drawing of the possible cases of one phase, with every kind and every mode in it."""
    every = [
        Case(phase, i, j, kind, checkpoint, m, n, around)
        for kind in KINDS
        for checkpoint in MODES
        for m in (1, 2, 3, 4)
        for n in (1, 2, 3)
        for i in range(m)
        for j in range(-1, n)
        for around in AROUND
    ]
    possible = [case for case in every if case.possible]
    return random.Random(f"faults, {phase}").sample(possible, A_PHASE)


def note_of(case: Case) -> str | None:
    """How the note begins that the error must have; ``None`` where pipert has none to give."""
    task = f"[{case.i},{case.j}]: partition {case.j} on cpu"
    whole = f", micro-batch {case.i} of {case.m}"
    names = {"forward": "F", "recomputation": "R"}
    if case.phase in names:
        return f"in {case.phase} {names[case.phase]}{task}, layer '{case.j}' (Layer){whole}"
    if case.phase == "stash":
        return f"in forward F{task}, layer '0' (Stash){whole}"
    if case.phase == "stash in recomputation":
        return f"in recomputation R{task}, layer '0' (Stash){whole}"
    return None


@pytest.fixture(scope="module", autouse=True)
def _no_gc() -> Iterator[None]:
    """For all cases together: a collection takes longer than a case."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "case", [case for phase in PHASES for case in cases_of(phase)], ids=lambda case: str(case)
)
def test_a_fault_is_raised_as_it_is_and_the_next_step_is_right(case: Case) -> None:
    skips = "stash" in case.phase or "pop" in case.phase
    setting = Setting(case.n, case.m, case.checkpoint, skips, case.phase in BOXED)
    setting.site.arm(case.phase, case.i, case.j, case.kind("a fault"))

    def run() -> None:
        with surroundings(case.around):
            setting.step()

    with setting.pipe:
        assert wrongs_of(setting, run, note_of(case)) == []


def test_the_drawing_has_every_exception_and_mode_in_every_phase() -> None:
    for phase in PHASES:
        drawn = cases_of(phase)
        kinds = {case.kind for case in drawn}
        assert set(KINDS) - kinds <= {StopIteration}, phase
        modes = 2 if phase.endswith("recomputation") else 3
        assert len({case.checkpoint for case in drawn}) == modes, phase
