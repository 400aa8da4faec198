"""DistributedDataParallel around a pipe: two processes, each with a pipe of its own, over gloo.

``_ddp_worker.py`` has the cases, each named by the fact that it shows. Both processes run all
cases, once for all tests here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipert
from tests.embedding import _ddp_worker

PACKAGE = Path(pipert.__file__).parent

EVERY = list(_ddp_worker.CASES)
MODES = _ddp_worker.MODES
IN_A_SWEEP = [
    case for k, case in enumerate(EVERY) if case.endswith(MODES) and k % 3 != k // 3 % 3
]  # of three modes, each case runs in one
CASES = [case for case in EVERY if case not in IN_A_SWEEP]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """For each process: an empty string for each case, or what went wrong."""
    folder = tmp_path_factory.mktemp("ddp")
    left_out = [] if request.config.option.sweep else IN_A_SWEEP
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.embedding._ddp_worker", str(folder), *left_out],
        cwd=PACKAGE.parent, env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(180)  # the first waits for all cases: 50 seconds on a busy machine
@pytest.mark.parametrize(
    "case", [*CASES, *[pytest.param(case, marks=pytest.mark.sweep) for case in IN_A_SWEEP]]
)
def test_in_two_processes(results: list[dict[str, str]], case: str) -> None:
    wrong = [f"process {rank}: {found[case]}" for rank, found in enumerate(results) if found[case]]
    assert not wrong, "\n".join(wrong)
