"""Tests that saved states of the training service fit one process and several."""

from __future__ import annotations

import importlib
import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipert import Pipe
from tests.distributed.launcher import run

pytest.importorskip("tqdm", reason="the service takes its model from an example that needs tqdm")
pytest.importorskip("prometheus_client", reason="the service shows its metrics with it")

from tests.examples.service_lives import (  # noqa: E402
    ENVIRONMENT,
    HOOKED,
    MODEL,
    ROOT,
    Folders,
    Starter,
)

TEXT = b"the pipeline is full when every worker has a task. " * 40


def steps(rank: int, folder: Path, ranks: int, count: int, save: bool) -> list[float]:
    """Continues from the last state, in one process or in one of ``ranks``; returns the losses."""
    gpt = importlib.import_module("models.gpt")
    torch.manual_seed(0)
    model = gpt.build_model(gpt.ModelConfig(context=16, width=16, layers=2, heads=2, dropout=0.2))
    if ranks > 1:
        pipe = importlib.import_module("ranks").RanksPipe(model, [2, 2], chunks=2)
    else:
        pipe = Pipe(model, [2, 2], devices=["cpu", "cpu"], chunks=2)
    corpus = importlib.import_module("service.corpus").Corpus(folder / "texts", 16, seed=0)
    trainer = importlib.import_module("service.trainer").Trainer(
        pipe, corpus, batch=8, lr=0.01, warmup=2, schedule="1f1b"
    )
    # One process has the folder, and what it reads goes to the others.
    state: list[Any] = [None]
    checkpoints = importlib.import_module("service.checkpoints")
    if rank == 0:
        with checkpoints.Checkpoints(folder / "state", keep=2) as saved:
            state[0] = saved.load()
    if ranks > 1:
        dist.broadcast_object_list(state, src=0)
    if state[0] is None:
        corpus.look()
    else:
        trainer.load_state_dict(state[0])
    losses = [trainer.step() for _ in range(count)]
    state[0] = trainer.state_dict()
    if save and rank == 0:
        with checkpoints.Checkpoints(folder / "state", keep=2) as saved:
            saved.save(trainer.steps, state[0])
    if ranks == 1:
        pipe.close()
    return losses


def test_one_process_and_two_take_turns(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt").write_bytes(TEXT)
    whole = steps(0, tmp_path, 1, 6, save=False)
    found = steps(0, tmp_path, 1, 2, save=True)
    first, second = run(2, steps, tmp_path, 2, 2, True)
    assert first == second
    found += first + steps(0, tmp_path, 1, 2, save=True)
    assert found == pytest.approx(whole, rel=1e-5)


def refuse() -> None:
    raise ValueError("there is no folder")


def fails(rank: int) -> tuple[type[BaseException], str]:
    """What each process gets of what the first one cannot do."""
    call_in_first = importlib.import_module("ranks").call_in_first
    assert call_in_first(lambda: rank) == 0
    with pytest.raises((ValueError, RuntimeError), match="there is no folder") as error:
        call_in_first(refuse)
    assert call_in_first(lambda: rank) == 0
    return error.type, str(error.value)


def test_a_failure_in_the_first_process_is_raised_in_all() -> None:
    first, second = run(2, fails)
    assert first == (ValueError, "there is no folder")
    assert second[0] is RuntimeError and "the first process has failed: ValueError" in second[1]


def test_processes_that_torchrun_has_not_started_cannot_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="--distributed is for torchrun"):
        importlib.import_module("ranks").join()


# --- the program ----------------------------------------------------------------------------------

RANKS = f"{MODEL} --save-every 2 --keep 9 --log-every 1 --port 0 --chunks 2 --distributed".split()


def serve(rank: int, folder: Path, options: list[str], what: str = "") -> list[dict[str, Any]]:
    """Runs one process of the service; returns its log."""
    program = importlib.import_module("training_service")
    log = folder / f"log of rank {rank}"
    hooked: dict[str, Any] = {"Service": importlib.import_module("service.loop").Service}
    exec(HOOKED.replace("model[1]", "model[2]") + what if what else "", hooked)  # the last one's
    argv = [*RANKS, "--data", str(folder / "data"), "--state", str(folder / "state"), *options]
    with log.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", file)
        assert program.main(argv, hooked["Service"]) == 0, log.read_text()
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def alone(starter: Starter, tmp_path: Path) -> Folders:
    (tmp_path / "alone").mkdir()
    return Folders(starter, tmp_path / "alone")


@pytest.fixture
def turns(starter: Starter, tmp_path: Path) -> Folders:
    (tmp_path / "turns").mkdir()
    return Folders(starter, tmp_path / "turns")


def assert_close(actual: Folders, expected: Folders, step: int) -> None:
    """Asserts that the same text was read, and that parameters are nearly equal."""
    (one, other) = (folders.final(step)["trainer"] for folders in (actual, expected))
    assert one["corpus"] == other["corpus"] and one["chunks"] == other["chunks"]
    for name in ("model", "optimizer"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_program_in_one_process_and_in_two_takes_turns(alone: Folders, turns: Folders) -> None:
    losses = []
    for folders in (alone, turns):
        (folders.data / "two.py").unlink()
        (folders.data / "one.txt").write_text(("the pipeline is full. " * 4)[:81])  # for 2.5 steps
        folders.run("--steps 2 --schedule 1f1b")
        (folders.data / "three.md").write_text("and there is more text, found when it saves. " * 9)
        if folders is turns:
            first, second = run(2, serve, folders.path, ["--steps", "6"])
            assert [line["step"] for line in first if line["event"] == "resumed"] == [2]
            assert any(line["event"] == "text found" for line in first)
            assert not second  # the first one serves and logs
            steps = {line["step"]: line["loss"] for line in first if line["event"] == "step"}
        else:
            steps = folders.run("--steps 6 --schedule 1f1b").losses()
        losses.append(steps | folders.run("--steps 8 --schedule 1f1b").losses())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and list(losses[1]) == [*range(3, 9)]
    assert_close(turns, alone, 8)


@pytest.mark.slow
def test_both_processes_stop_when_one_is_told_to(alone: Folders) -> None:
    told = """
import torch.distributed as dist

def during(step, rows):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
"""
    first, _ = run(2, serve, alone.path, [], told)
    last = first[-1]
    assert (last["event"], last["step"], last["signal"]) == ("stopped", 3, signal.SIGTERM)
    alone.final(3)


@pytest.mark.slow
def test_both_processes_continue_with_smaller_micro_batches_when_one_runs_out_of_memory(
    alone: Folders, turns: Folders
) -> None:
    full = """
def during(step, rows):
    if rows > 1:
        raise torch.OutOfMemoryError("there is room for one row")
"""
    alone.run("--steps 2 --schedule 1f1b", HOOKED + full)
    for log in run(2, serve, turns.path, ["--steps", "2"], full):
        assert [line["chunks"] for line in log if line["event"] == "out of memory"] == [4]
    assert_close(turns, alone, 2)


@pytest.mark.sweep
def test_the_program_runs_under_torchrun(turns: Folders) -> None:
    turns.run("--steps 2 --schedule 1f1b")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    program = [str(ROOT / "examples" / "training_service.py"), *RANKS, "--steps", "4"]
    folders = ["--data", str(turns.data), "--state", str(turns.state)]
    subprocess.run([*launcher, *program, *folders], env=ENVIRONMENT, check=True, timeout=60)
    turns.run("--steps 6 --schedule 1f1b")
    assert turns.final(6)["trainer"]["steps"] == 6


def has_left(rank: int, program: str, argv: list[str]) -> bool:
    """Runs an example as Python does; returns whether it has left the process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [program, *argv])
        try:
            runpy.run_path(str(ROOT / "examples" / program), run_name="__main__")
        except SystemExit as exiting:
            assert exiting.code == 0
    return not dist.is_initialized()


@pytest.mark.parametrize("program", ["train_gpt.py", "training_service.py"])
def test_a_program_leaves_the_process_group(program: str, tmp_path: Path) -> None:
    """Else a thread of gloo that frees a tensor late aborts the process that exits."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    options = {
        "train_gpt.py": ["--sample", "0", "--data", str(tmp_path / "text.txt")],
        "training_service.py": [
            *"--save-every 2 --keep 1 --log-every 1 --port 0 --data".split(),
            *[str(tmp_path), "--state", str(tmp_path / "state")],
        ],
    }
    argv = [*MODEL.split(), "--distributed", "--chunks", "2", "--steps", "2", *options[program]]
    assert run(1, has_left, program, argv) == [True]
