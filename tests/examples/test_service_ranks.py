"""The saved states of the training service fit one process and several."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run

pytest.importorskip("tqdm", reason="the service takes its model from an example that needs tqdm")

TEXT = b"the pipeline is full when every worker has a task. " * 40


def steps(rank: int, folder: Path, ranks: int, count: int, save: bool) -> list[float]:
    """Go on from the last state, in one process or in one of ``ranks``; the losses."""
    gpt = importlib.import_module("train_gpt")
    torch.manual_seed(0)
    model = gpt.build_model(gpt.ModelConfig(context=16, width=16, layers=2, heads=2, dropout=0.2))
    if ranks > 1:
        pipe = gpt.RanksPipe(model, [2, 2], chunks=2)
    else:
        pipe = gpt.Pipe(model, [2, 2], devices=["cpu", "cpu"], chunks=2)
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
        torch.distributed.broadcast_object_list(state, src=0)
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
