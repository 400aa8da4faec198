"""Tests ``python -m pipert demo``: what it prints is where it says, and the model learns."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipert.__main__ import main


@pytest.mark.slow
@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_the_demo_leaves_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    has_matplotlib: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        find: Any = importlib.util.find_spec
        monkeypatch.setattr(
            "pipert.demo.find_spec", lambda name: find(name) if name != "matplotlib" else None
        )
    assert main(["demo", "--seconds", "1", "--out", str(tmp_path / "new" / "folder")]) == 0
    said = capsys.readouterr().out
    files = {Path(found).name: Path(found) for found in re.findall(rf"{tmp_path}[^\s,]*", said)}
    assert ("picture.png" in files) == has_matplotlib
    assert ("pip install matplotlib" in said) != has_matplotlib
    assert all(file.stat().st_size for file in files.values())
    assert "Calls: 2, micro-batches: 8" in files["report.txt"].read_text()
    assert json.loads(files["trace.json"].read_text())["traceEvents"]
    losses = [float(loss) for loss in re.findall(r"loss (\d.*)", said)]
    assert losses[-1] < losses[0]
