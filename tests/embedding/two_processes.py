"""Running a script of cases in two processes, which talk over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pipert

__all__ = ["run_in_two_processes", "what_went_wrong"]

Results = list[dict[str, str]]


def run_in_two_processes(
    worker: Path, folder: Path, cases: Sequence[str], timeout: float
) -> Results:
    """For each process: an empty string for each case, or what went wrong.

    Args:
        worker: a script; its arguments are rank, a file to meet at, and the file for its results.
        folder: for these files.
        cases: that it is expected to have run.
        timeout: seconds for each process.
    """
    paths = [str(Path(pipert.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    files = [folder / f"results-{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(folder / "store"), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [json.loads(file.read_text()) for file in files]
    assert [sorted(each) for each in found] == [sorted(cases)] * 2, "the list is not whole"
    return found


def what_went_wrong(results: Results, case: str) -> str:
    """In any of the processes; nothing, if all is well."""
    wrong = [f"process {rank}: {found[case]}" for rank, found in enumerate(results) if found[case]]
    return "\n".join(wrong)
