"""Selects the options of pytest and the tests, in stages, that a mutant is tried against.

Only simulated GPUs show mutants of waits. Breakages of anything else must show without them: most
machines that run the tests have no GPU and build no simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.mutants.mutant import Mutant

__all__ = ["ORDINARY", "SIMULATED", "Stages", "Suite"]

Stages = Sequence[Sequence[str]]


class Suite(NamedTuple):
    """A way to run the tests."""

    options: Sequence[str]
    """Options of pytest."""
    preload: str
    """The module that is imported in the process from which trials are forked."""
    stages: Callable[[Mutant], Stages]
    """Returns the tests for a mutant; a stage runs if no test of the previous one noticed."""


TELLING = (
    "tests/cuda/test_waits.py", "tests/cuda/test_waits_for_skips.py",
    "tests/cuda/test_copies_overlap.py", "tests/cuda/test_written_after_use.py",
    "tests/cuda/test_read_on_other_streams.py", "tests/cuda/test_streams_are_put_back.py",
)  # fmt: skip
"""The tests made for mutants, which notice most of them within a second."""

FIRST = {
    "pipert/stage/recorded.py": ("tests/cuda/test_copies_overlap.py",),
    "pipert/balance/": ("tests/balance/test_measure.py", "tests/balance/test_by_time.py"),
    "pipert/model/calls.py": ("tests/model/test_calls.py",),
    "pipert/layers/effects.py": (
        "tests/step/test_in_virtual_time.py", "tests/devices/test_out_of_memory.py",
    ),
    "pipert/layers/random_numbers.py": ("tests/cuda/test_random_on_cuda.py",),
    "pipert/layers/default_generators.py": ("tests/cuda/test_random_on_cuda.py",),
    "pipert/any_model/": ("tests/any_model/test_on_gpus.py",),
}
"""The tests that run first for mutants of some files, since no others can notice them."""

LIKELY = (
    "tests/any_model/test_on_gpus.py",
    "tests/autograd/test_random.py",
    "tests/stage",
    "tests/recording",
    "tests/balance",
    "tests/check/test_check_on_gpus.py",
    "tests/cuda/test_cuda.py",
    "tests/skip/test_skips_on_cuda.py",
    "tests/workers/test_context.py",
)
"""Other tests that look at streams, for the second stage. The third runs all tests."""

NOT_SLOW = ("-m", "not slow")
ALL = ("tests",)


def _on_simulated_gpus(mutant: Mutant) -> Stages:
    first = [
        test for path, tests in FIRST.items() if mutant.file.startswith(path) for test in tests
    ]
    telling = [*first, *[test for test in TELLING if test not in first]]
    return telling, (*LIKELY, *NOT_SLOW), ALL


def _on_cpu(mutant: Mutant) -> Stages:
    return mutant.tests, ALL


SIMULATED = Suite(("--simulated-gpus",), "tests.mutants.preload", _on_simulated_gpus)
ORDINARY = Suite((), "tests.mutants.preload_torch", _on_cpu)
