"""Tests the DDP example: a run is the same with one process and with two, and resumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import pipert

TEXT = b"the pipeline is full when every worker has a task. " * 100
MODEL = "--context 16 --width 16 --layers 2 --heads 2 --batch 16 --accumulate 2 --chunks 2"
STEPS, FIRST = 20, 8  # of the whole run, and of its first part

# The first of them waits for three processes to start, which on a busy machine takes its time.
pytestmark = pytest.mark.timeout(180)

# For ten seconds; tests/embedding/test_ddp.py has steps in two processes in each run.
starts_processes = pytest.mark.sweep

pytest.importorskip("tqdm", reason="the example imports another, which shows its progress")


def options(folder: Path, *more: object) -> list[str]:
    """Returns the options of a short run."""
    data = folder / "text.txt"
    data.write_bytes(TEXT)
    return [*MODEL.split(), "--lr", "0.01", "--data", str(data), *map(str, more)]


class Runs(NamedTuple):
    """The output and files of the same run, with one process and, resumed, with two."""

    alone: Any
    """The result of the whole run with one process."""
    model_alone: dict[str, torch.Tensor]
    output: str
    """Of the rest of the run with two processes."""
    model: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def runs(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ddp")
    whole, first, rest = (folder / name for name in ("whole.pt", "first.pt", "rest.pt"))
    alone = example.main(options(folder, "--steps", STEPS, "--save", whole))
    example.main(options(folder, "--steps", FIRST, "--save", first))
    output = torchrun(example, options(folder, "--steps", STEPS, "--resume", first, "--save", rest))
    states = [torch.load(file, weights_only=True)["training"] for file in (whole, rest)]
    assert [state["step"] for state in states] == [STEPS, STEPS]
    return Runs(alone, states[0]["model"], output, states[1]["model"])


def torchrun(example: ModuleType, argv: list[str]) -> str:
    """Runs two processes; returns what they print."""
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
    return result.stdout


def assert_same_training(runs: Runs) -> None:
    """All weights are close, but for biases of keys.

    These move each row of scores as a whole, which softmax takes away again. Their gradients are
    nothing but rounding, which is another one on each machine, and Adam makes steps of it.
    """
    for model in (runs.model, runs.model_alone):
        for name, weight in model.items():
            if name.endswith("attend.1.bias"):
                weight.chunk(3)[1].zero_()  # of queries, keys and values
    torch.testing.assert_close(runs.model, runs.model_alone, rtol=1e-3, atol=1e-4)


@starts_processes
def test_training_lowers_the_held_out_loss(runs: Runs) -> None:
    assert runs.alone.after < runs.alone.before - 1


@starts_processes
def test_two_processes_end_a_run_as_one_does_that_began_it(runs: Runs) -> None:
    assert_same_training(runs)


@starts_processes
@pytest.mark.multi_gpu
def test_the_processes_train_on_gpus_where_there_are_some(runs: Runs) -> None:
    assert re.match(r"2 processes; in process 0, of 4 layers: \d on cuda:0", runs.output)
    assert_same_training(runs)


def test_a_process_that_fails_does_not_wait_for_the_others(example: ModuleType) -> None:
    """To leave the process group is to wait for operations that other processes have not begun."""
    with pytest.raises(ValueError, match="a layer has failed"):
        with example.process_group("gloo"):
            raise ValueError("a layer has failed")
    assert dist.is_initialized()
    dist.destroy_process_group()
