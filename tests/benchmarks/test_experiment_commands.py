"""Tests that every experiment runs in its shortest form on a machine with no GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torchgpipe", reason="the experiments run torchgpipe beside pipert")
pytest.importorskip("tqdm", reason="the experiments show their progress with tqdm")

SHORT = ["--scale", "tiny", "--steps", "1", "--devices", "cpu,cpu"]

EVERY = pytest.mark.sweep  # ten seconds each; the first shows that a table is made

COMMANDS = {
    "speed unet": ("pipeline-8", "88.5", "3.10"),
    "speed amoebanet": ("n=8 m=32", "132.4", "4.95"),
    "speed resnet": ("pipeline-8",),
    "unet_memory": ("pipeline-8", "154.1", "15.82"),
    "unet_ablation": ("+ direct skips", "58.5", "75%"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # seconds on a machine that is busy


@pytest.mark.parametrize(
    "command",
    [
        "speed unet",
        *[pytest.param(command, marks=EVERY) for command in COMMANDS if command != "speed unet"],
    ],
)
def test_the_table_has_the_papers_figures(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "figures.json"
    options = [*SHORT, "--json", str(written)]
    if command == "unet_ablation":
        pytest.importorskip("matplotlib", reason="it draws a picture")
        options += ["--picture", str(tmp_path / "timelines.svg")]
    name, *model = command.split()
    assert importlib.import_module(name).main([*model, *options]) == 0
    shown = capsys.readouterr().out
    for text in (*COMMANDS[command], "torchgpipe 0.0.7", "cores"):
        assert text in shown
    figures = json.loads(written.read_text())
    assert {"versions", "hardware", "options", "measured"} <= figures.keys()
    if command == "unet_ablation":
        assert "+ copy streams" in (tmp_path / "timelines.svg").read_text()
