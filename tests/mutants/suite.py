"""What a mutant is tried against: the options of pytest, and tests in stages.

Mutants of waits are noticed on simulated GPUs alone. Breakages of anything else must be noticed
without: most machines that the tests run on have no GPU and build no simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.mutants.mutant import Mutant

__all__ = ["ORDINARY", "SIMULATED", "Stages", "Suite"]

Stages = Sequence[Sequence[str]]


class Suite(NamedTuple):
    """One way to run the tests."""

    options: Sequence[str]
    """Of pytest."""
    preload: str
    """The module that the process has imported which trials are forked from."""
    stages: Callable[[Mutant], Stages]
    """The tests for a mutant: those of a stage run if none of the one before has noticed."""


TELLING = (
    "tests/cuda/test_waits.py", "tests/cuda/test_waits_for_skips.py",
    "tests/cuda/test_copies_overlap.py", "tests/cuda/test_written_after_use.py",
    "tests/cuda/test_read_on_other_streams.py", "tests/cuda/test_streams_are_put_back.py",
)  # fmt: skip
"""What is made for mutants, and notices most of them within a second."""

FIRST = {
    "pipert/stage/recorded.py": ("tests/cuda/test_copies_overlap.py",),
    "pipert/seeing/": (
        "tests/cuda/test_copies_overlap.py", "tests/recording/test_pieces_on_a_gpu.py",
    ),
    "pipert/check/": ("tests/check/test_check_on_gpus.py",),
    "pipert/balance/": ("tests/balance/test_probe.py", "tests/balance/test_by_time.py"),
    "pipert/model/calls.py": ("tests/model/test_calls.py",),
    "pipert/layers/generators.py": ("tests/cuda/test_cuda.py",),
}
"""What comes before that for a mutant of some files: nothing else can see it."""

LIKELY = (
    "tests/step/test_step_streams.py",
    "tests/test_stream.py",
    "tests/autograd/test_transfer.py",
    "tests/autograd/test_random.py",
    "tests/stage",
    "tests/recording",
    "tests/balance",
    "tests/check/test_check_on_gpus.py",
    "tests/cuda/test_cuda.py",
    "tests/cuda/test_tied_on_cuda.py",
    "tests/skip/test_skips_on_cuda.py",
    "tests/workers/test_context.py",
)
"""What else looks at streams. Then come all others."""

NOT_SLOW = ("-m", "not slow")
ALL = ("tests",)


def _on_simulated_gpus(mutant: Mutant) -> Stages:
    first = [test for of, some in FIRST.items() if mutant.file.startswith(of) for test in some]
    telling = [*first, *[test for test in TELLING if test not in first]]
    return telling, (*LIKELY, *NOT_SLOW), ALL


def _on_cpu(mutant: Mutant) -> Stages:
    return mutant.tests, ALL


SIMULATED = Suite(("--simulated-gpus",), "tests.mutants.preload", _on_simulated_gpus)
ORDINARY = Suite((), "tests.mutants.preload_torch", _on_cpu)
