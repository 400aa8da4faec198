"""Tests that the GPT example ends alike over two processes and in one, and shares its files."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import run

pytest.importorskip("tqdm", reason="the example shows its progress with tqdm")

TEXT = b"the pipeline is full when every worker has a task. " * 100
MODEL = (
    "--context 16 --width 16 --layers 2 --heads 2 --batch 8 --chunks 2 --warmup 2 --lr 0.01 "
    "--dropout 0.2 --schedule 1f1b --steps 4 --sample 3"
).split()


def train(rank: int, options: list[str]) -> Any:
    return importlib.import_module("train_gpt").main(options)


def alone(options: list[str]) -> Any:
    return train(0, ["--devices", "cpu,cpu", *options])


def together(options: list[str]) -> Any:
    first, second = run(2, train, ["--distributed", *options])
    assert first == second
    return first


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    data = tmp_path / "text.txt"
    data.write_bytes(TEXT)
    return [*MODEL, "--data", str(data)]


def assert_alike(one: Any, other: Any) -> None:
    assert (one.steps, one.sample) == (other.steps, other.sample)
    assert (one.before, one.after) == pytest.approx((other.before, other.after), rel=1e-5)


def test_two_processes_train_like_one(options: list[str], tmp_path: Path) -> None:
    """From the beginning, and from the middle in either order."""
    files = [tmp_path / f"{name}.pt" for name in ("alone", "together", "first", "second")]
    save = [["--save", str(file)] for file in files]
    whole = alone([*options, *save[0]])
    assert_alike(together([*options, *save[1]]), whole)
    alone([*options, "--stop-at", "2", *save[2]])
    assert_alike(together(["--resume", str(files[2]), "--sample", "3", *save[3]]), whole)
    together([*options, "--stop-at", "2", *save[3]])
    resumed = alone(["--resume", str(files[3]), "--schedule", "1f1b", "--sample", "3"])
    assert_alike(resumed, whole)
    states = [torch.load(file, weights_only=True)["trainer"] for file in files[:2]]
    for name in ("model", "optimizer"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-3, atol=1e-5)


def has_left(rank: int, program: str, argv: list[str]) -> bool:
    """Runs an example as Python does; returns whether it has left the process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [program, *argv])
        runpy.run_path(program, run_name="__main__")
    return not dist.is_initialized()


def test_the_program_leaves_the_process_group(options: list[str]) -> None:
    """Else a thread of gloo that frees a tensor late aborts the process that exits."""
    program = str(Path(__file__).parents[2] / "examples" / "train_gpt.py")
    assert run(1, has_left, program, ["--distributed", *options]) == [True]
