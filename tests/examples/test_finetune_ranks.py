"""Tests the example that fine-tunes a model of transformers over two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_ranks.py"


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.sweep), ["--lora"]])
def test_two_ranks_train_and_save_what_one_process_loads(more: list[str]) -> None:
    if more:
        pytest.importorskip("peft")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    found = subprocess.run(
        [*launch, str(EXAMPLE), "--steps=6", *more],
        capture_output=True, text=True, timeout=170, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert "the plain model computes the same" in found.stdout
