"""The tests that need a real GPU even where there are simulated ones, by name and with the reason.

``tests/simulated_gpus/test_cannot_run.py`` keeps the list true: each pattern matches a test, and no
other test marked ``cuda`` or ``multi_gpu`` is skipped.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["CANNOT_RUN", "matches", "reason"]

RESERVED = (
    "about what torch's caching allocator keeps reserved: the simulated one gives each block back "
    "when it is freed, so there is nothing to see in its 300 steps"
)
PROCESSES = (
    "processes on GPUs talk by NCCL, which a build of torch without CUDA has not, and whose gloo "
    "takes the CPU's memory alone"
)

CTC = "on a GPU the loss asks cuDNN first, of which a build of torch without CUDA has no function"

CANNOT_RUN: dict[str, str] = {
    "tests/any_model/test_families_on_gpus.py::test_*[wav2vec2, ctc-*": CTC,
    "tests/cuda/test_cuda.py::test_pitfall_29_reserved_memory_stays_flat*": RESERVED,
    "tests/skip/test_skips_on_cuda.py::test_reserved_memory_stays_flat*": RESERVED,
    "tests/examples/test_train_ddp.py::test_the_processes_train_on_gpus_*": PROCESSES,
}
"""``fnmatch`` patterns of node ids."""


def matches(pattern: str, nodeid: str) -> bool:
    """Whether a pattern means this test. Brackets are those of the node id."""
    return fnmatchcase(nodeid, pattern.replace("[", "[[]"))


def reason(nodeid: str) -> str | None:
    """Why a test cannot run on simulated GPUs; ``None`` if it can."""
    return next((why for pattern, why in CANNOT_RUN.items() if matches(pattern, nodeid)), None)
