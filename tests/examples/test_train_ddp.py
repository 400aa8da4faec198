"""Tests the DDP example: a run is the same with one process and with two, and resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import pipert

TEXT = b"the pipeline is full when every worker has a task. " * 100
MODEL = "--context 16 --width 16 --layers 2 --heads 2 --batch 16 --accumulate 2 --chunks 2"
STEPS, FIRST = 20, 8  # of the whole run, and of its first part

pytest.importorskip("tqdm", reason="the example imports another, which shows its progress")


def options(folder: Path, *more: object) -> list[str]:
    """Returns the options of a short run."""
    data = folder / "text.txt"
    data.write_bytes(TEXT)
    return [*MODEL.split(), "--lr", "0.01", "--data", str(data), *map(str, more)]


def torchrun(example: ModuleType, argv: list[str]) -> None:
    """Runs two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = f"{Path(pipert.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [*command, str(example.__file__), *argv],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.sweep  # for ten seconds; tests/embedding/test_ddp.py has steps in two processes
@pytest.mark.timeout(180)  # it waits for three processes to start
def test_two_processes_end_a_run_as_one_does_that_began_it(
    example: ModuleType, tmp_path: Path
) -> None:
    """But for biases of keys.

    These move each row of scores as a whole, which softmax takes away again. Their gradients are
    nothing but rounding, which is another one on each machine, and Adam makes steps of it.
    """
    whole, first, rest = (tmp_path / name for name in ("whole.pt", "first.pt", "rest.pt"))
    alone = example.main(options(tmp_path, "--steps", STEPS, "--save", whole))
    assert alone.after < alone.before - 1
    example.main(options(tmp_path, "--steps", FIRST, "--save", first))
    torchrun(example, options(tmp_path, "--steps", STEPS, "--resume", first, "--save", rest))
    states = [torch.load(file, weights_only=True)["training"] for file in (whole, rest)]
    assert [state["step"] for state in states] == [STEPS, STEPS]
    for model in (models := [state["model"] for state in states]):
        for name, weight in model.items():
            if name.endswith("attend.1.bias"):
                weight.chunk(3)[1].zero_()  # of queries, keys and values
    torch.testing.assert_close(*models, rtol=1e-3, atol=1e-4)


def test_a_process_that_fails_does_not_wait_for_the_others(example: ModuleType) -> None:
    """To leave the process group is to wait for operations that other processes have not begun."""
    with pytest.raises(ValueError, match="a layer has failed"):
        with example.process_group("gloo"):
            raise ValueError("a layer has failed")
    assert dist.is_initialized()
    dist.destroy_process_group()
