"""Whole steps in two processes over gloo, by the two recipes of docs/several_machines.md.

What is tested stands in ``_step_ddp_worker.py``, each case under the fact that it shows. Both
processes run all cases, once for all tests here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipert

WORKER = Path(__file__).with_name("_step_ddp_worker.py")
PACKAGE = Path(pipert.__file__).parent

FACTS = (
    "averaged_gradients_are_those_of_the_whole_batch",
    "ddp_around_a_step_reduces_once_what_the_whole_batch_gives",
    "ddp_around_a_step_accumulates_in_no_sync",
    "a_step_in_ddp_leaves_gradients_alone_until_its_backward",
    "frozen_layers_stay_without_gradient",
)
CASES = [f"{fact}-{schedule}" for fact in FACTS for schedule in ("gpipe", "1f1b")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """For each process: an empty string for each case, or what went wrong."""
    folder = tmp_path_factory.mktemp("step-ddp")
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    files = [folder / f"results-{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder / "store"), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=100)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [json.loads(file.read_text()) for file in files]
    assert [sorted(each) for each in found] == [sorted(CASES)] * 2, "the list above is not whole"
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)  # the first waits for all cases
@pytest.mark.parametrize("case", CASES)
def test_in_two_processes(results: list[dict[str, str]], case: str) -> None:
    wrong = [f"process {rank}: {found[case]}" for rank, found in enumerate(results) if found[case]]
    assert not wrong, "\n".join(wrong)
