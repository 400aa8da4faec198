"""Lists the tests that cannot run on simulated GPUs, with the reason of each.

``tests/simulated_gpus/test_cannot_run.py`` keeps the list true: each pattern matches a test, and no
other test marked ``cuda`` or ``multi_gpu`` is skipped.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["CANNOT_RUN", "matches", "reason"]

RESERVED = (
    "about memory that torch's caching allocator keeps reserved: the simulated one returns each "
    "block when it is freed, so its 300 steps would show nothing"
)

CTC = "on a GPU the loss asks cuDNN first, whose functions a build of torch without CUDA lacks"

CANNOT_RUN: dict[str, str] = {
    "tests/any_model/test_families_on_gpus.py::test_*[wav2vec2, ctc-*": CTC,
    "tests/any_model/test_families_in_place.py::test_*[wav2vec2, ctc-gpus*": CTC,
    "tests/cuda/test_cuda.py::test_pitfall_29_reserved_memory_stays_flat*": RESERVED,
}
"""``fnmatch`` patterns of node ids."""


def matches(pattern: str, nodeid: str) -> bool:
    """Whether a pattern matches this test. A bracket in the pattern stands for itself."""
    return fnmatchcase(nodeid, pattern.replace("[", "[[]"))


def reason(nodeid: str) -> str | None:
    """Returns why a test cannot run on simulated GPUs; ``None`` if it can."""
    return next((why for pattern, why in CANNOT_RUN.items() if matches(pattern, nodeid)), None)
