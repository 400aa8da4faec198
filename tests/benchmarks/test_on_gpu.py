"""Tests that the program for GPUs writes its page after each measurement, whatever happens to one.

``.ci/run`` runs all of it, on CPU workers and on simulated GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import on_gpu
import pytest
import torch


def test_a_measurement_that_fails_is_printed_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: on_gpu.Program) -> on_gpu.Section:
        """What fails."""
        raise ValueError("from a measurement")

    monkeypatch.setattr(on_gpu.Program, "sections", lambda self: [
        lambda: fail(self), lambda: self.run("A program", ["-c", "print('it ran')"]),
    ])  # fmt: skip
    assert on_gpu.main(["--short", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "on_gpu.md").read_text()
    assert "ValueError: from a measurement" in page and "it ran" in page and "torch" in page
    failed = [s["failed"] for s in json.loads((tmp_path / "on_gpu.json").read_text())["sections"]]
    assert failed == [True, False]


def test_a_program_that_takes_too_long_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "MINUTES", 0.0)
    program = on_gpu.Program([torch.device("cpu")], True, tmp_path)
    slow = "import time; print('begun', flush=True); time.sleep(100)"
    found = program.run("A program", ["-c", slow])
    assert found.failed and "broken off" in found.text and "begun" in found.text
