"""Selects the tests, in stages, that a mutant is tried against on simulated GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutants.mutant import Mutant

__all__ = ["stages"]

TELLING = (
    "tests/cuda/test_waits.py", "tests/cuda/test_waits_for_skips.py",
    "tests/cuda/test_copies_overlap.py", "tests/cuda/test_written_after_use.py",
    "tests/cuda/test_read_on_other_streams.py", "tests/cuda/test_streams_are_put_back.py",
)  # fmt: skip
"""The tests made for mutants, which notice most of them within a second."""

FIRST = {
    "pipert/stage/recorded.py": ("tests/cuda/test_copies_overlap.py",),
    "pipert/layers/effects.py": (
        "tests/step/test_in_virtual_time.py", "tests/devices/test_out_of_memory.py",
        "tests/layers/test_effects.py",
    ),
    "pipert/layers/random_numbers.py": ("tests/cuda/test_random_on_cuda.py",),
    "pipert/layers/default_generators.py": ("tests/cuda/test_random_on_cuda.py",),
    "pipert/any_model/": ("tests/any_model/test_on_gpus.py",),
}
"""The tests that run first for mutants of some files, since no others can notice them."""

LIKELY = (
    "tests/any_model/test_on_gpus.py",
    "tests/recording",
    "tests/check/test_check_on_gpus.py",
    "tests/cuda/test_cuda.py",
    "tests/skip/test_skips_on_cuda.py",
    "tests/workers/test_context.py",
)
"""Other tests that look at streams, for the second stage. The third runs all tests."""

NOT_SLOW = ("-m", "not slow")


def stages(mutant: Mutant) -> Sequence[Sequence[str]]:
    """Returns the tests for a mutant; a stage runs if no test of the previous one noticed."""
    first = [
        test for path, tests in FIRST.items() if mutant.file.startswith(path) for test in tests
    ]
    telling = [*first, *[test for test in TELLING if test not in first]]
    return telling, (*LIKELY, *NOT_SLOW), ("tests",)
